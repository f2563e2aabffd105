//! The report page in a real browser: no error, no request, sorting, filtering, folding, maps under the pointer and the keys, light and
//! dark, phone and desk. `MCL_SHOTS=folder` keeps a picture of every state. Where no Chromium is installed it says so and is counted.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use support::chromium::{Browser, installed};

/// Answers to test images of `classes` classes: the first third of every class is taken for the next class.
fn answers(classes: usize, each: usize, shift: usize) -> Value {
    let (mut labels, mut predicted) = (vec![], vec![]);
    let mut confusion = vec![vec![0; classes]; classes];
    for class in 0..classes {
        for i in 0..each {
            let answer = if i < each / 3 + class % 2 { (class + shift) % classes } else { class };
            confusion[class][answer] += 1;
            labels.push(class);
            predicted.push(answer);
        }
    }
    let names: Vec<String> = (0..classes).map(|c| format!("kind {c}")).collect();
    json!({ "classes": names, "confusion": confusion, "labels": labels, "predicted": predicted })
}

/// A folder of results as `mcl-eval` leaves it: probes of two networks on ten and on 200 classes, and a map of the ten.
fn results(root: &Path) -> PathBuf {
    let folder = root.join("results");
    fs::create_dir_all(folder.join("figures")).unwrap();
    let mut rows = vec![];
    for (dataset, classes) in [("few", 10), ("many", 200)] {
        for (n, (method, name)) in [("l_mcl", "a/peer-0"), ("dml", "b/peer-0")].iter().enumerate() {
            let detail = answers(classes, 12, 1 + n);
            rows.push(
                json!({ "command": "linear-probe", "protocol": "lbfgs", "dataset": dataset, "metric": "top1", "value": 60.0 + n as f64,
                "ci_low": 58.0, "ci_high": 63.0, "top5": 90.5, "n_test": classes * 12, "subject": name, "method": method, "arch": "resnet8",
                "peer": 0, "weights_hash": name, "detail": detail }),
            );
        }
    }
    for (n, (method, name)) in [("l_mcl", "a/peer-0"), ("dml", "b/peer-0")].iter().enumerate() {
        for shots in [1, 5, 10] {
            let value = 20.0 + (shots * (n + 1)) as f64;
            rows.push(json!({ "command": "few-shot", "dataset": "few", "metric": "top1", "value": value, "variant": format!("shots={shots}"),
                "ci_low": value - 2.0, "ci_high": value + 2.0, "n_test": 120, "subject": name, "method": method, "arch": "resnet8", "peer": 0,
                "weights_hash": name }));
        }
    }
    let place = |i: usize, turn: f64| {
        let angle = i as f64 * 0.61 + turn;
        json!([angle.cos() * (1.0 + i as f64), angle.sin() * (1.0 + i as f64)])
    };
    let panel = |name: &str, turn: f64| {
        let points: Vec<Value> = (0..120).map(|i| place(i, turn)).collect();
        json!({ "name": name, "title": format!("{name} <b>"), "note": "KL 1.0", "points": points, "answers": vec![3; 120] })
    };
    let classes = answers(10, 12, 1)["classes"].clone();
    let map = json!({ "classes": classes, "images": (0..120).collect::<Vec<_>>(), "labels": (0..120).map(|i| i / 12).collect::<Vec<_>>(),
        "answered_by": "neighbours", "panels": [panel("a/peer-0", 0.0), panel("b/peer-0", 1.0)] });
    fs::write(folder.join("figures/map.json"), map.to_string()).unwrap();
    let svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"700\" height=\"50\"><script>alert(1)</script></svg>";
    fs::write(folder.join("figures/map.svg"), svg).unwrap();
    rows.push(json!({ "command": "tsne", "dataset": "few", "metric": "kl", "value": 1.0, "subject": "a/peer-0", "n_test": 120,
        "detail": { "figures": [{ "svg": folder.join("figures/map.svg"), "caption": "a map <script>alert(2)</script>" }] } }));
    fs::write(folder.join("results.jsonl"), rows.iter().map(|r| format!("{r}\n")).collect::<String>()).unwrap();
    folder
}

fn report(root: &Path) -> PathBuf {
    results(root);
    let made = Command::new(support::EVAL)
        .args(["report", "--results", "results", "--out", "out", "--title", "Two networks <img src=x onerror=alert(3)>"])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    root.join("out/report.html")
}

/// Elements that reach beyond the window, unless they lie in a box that scrolls by itself.
const WIDE: &str = r#"(()=>{const w=document.documentElement.clientWidth;const out=[];
if(document.documentElement.scrollWidth>w)out.push('page '+document.documentElement.scrollWidth+' of '+w);
document.querySelectorAll('body *').forEach(e=>{if(e.closest('.wide,.still,nav,pre,.legend,.skip,svg'))
{if(!e.matches('.wide,.still,nav,pre,.legend'))return}
const b=e.getBoundingClientRect();if(b.width&&b.right>w+1)out.push(e.tagName+'.'+e.className+' '+Math.round(b.right))});return out.slice(0,8)})()"#;

/// Text whose contrast with what lies behind it is below WCAG AA (4.5, large text 3). Numbers in coloured cells are drawn for their cell.
const CONTRAST: &str = r#"(()=>{const rgb=c=>{const m=c.match(/[\d.]+/g).map(Number);return m.length<4||m[3]>0?m:null};
const lum=c=>{const f=c.slice(0,3).map(v=>{v/=255;return v<=.03928?v/12.92:((v+.055)/1.055)**2.4});return .2126*f[0]+.7152*f[1]+.0722*f[2]};
const back=e=>{for(;e;e=e.parentElement){const c=rgb(getComputedStyle(e).backgroundColor);if(c)return c}return [255,255,255]};
const out=[];document.querySelectorAll('body *').forEach(e=>{
if(!Array.from(e.childNodes).some(n=>n.nodeType===3&&n.textContent.trim())||!e.getBoundingClientRect().width||e.closest('script,.skip'))return;
const s=getComputedStyle(e),svg=e.tagName==='text';if(svg&&!e.matches('.ink,.soft'))return;
const a=lum(rgb(svg?s.fill:s.color)||[0,0,0]),b=lum(back(e));const r=(Math.max(a,b)+.05)/(Math.min(a,b)+.05);
const big=parseFloat(s.fontSize)>=24;if(r<(big?3:4.5))out.push(e.tagName+' '+r.toFixed(2)+' '+e.textContent.slice(0,30))});return out.slice(0,8)})()"#;

/// Text of figures that is drawn smaller than it can be read, and pictures that a phone would show smaller than they are. Both scroll.
const SMALL: &str = r#"(()=>{const out=[],phone=innerWidth<600;document.querySelectorAll('figure svg text').forEach(t=>{const g=t.ownerSVGElement,
b=g.getBoundingClientRect();if(!b.width)return;const px=parseFloat(t.getAttribute('font-size'))*b.width/g.viewBox.baseVal.width;
if(px<9)out.push(px.toFixed(1)+' '+t.textContent.slice(0,30))});
if(phone)document.querySelectorAll('.still>img').forEach(i=>{if(i.width&&i.width<i.naturalWidth)out.push('picture '+i.width+' of '+i.naturalWidth)});
return out.slice(0,8)})()"#;

/// Text of figures that reaches beyond its figure.
const CLIPPED: &str = r#"(()=>{const out=[];document.querySelectorAll('figure svg').forEach(g=>{const b=g.getBoundingClientRect();if(!b.width)return;
g.querySelectorAll('text').forEach(t=>{const r=t.getBoundingClientRect();if(t.textContent&&(r.left<b.left-1||r.right>b.right+1||r.top<b.top-1||r.bottom>b.bottom+1))
out.push(t.textContent.slice(0,40))})});return out.slice(0,8)})()"#;

/// What a keyboard reaches that has no name for those who hear the page.
const NAMELESS: &str = r#"Array.from(document.querySelectorAll('a,button,input,canvas[tabindex],[role=region]')).filter(e=>
!(e.textContent.trim()||e.getAttribute('aria-label')||(e.labels&&e.labels.length))).map(e=>e.outerHTML.slice(0,80))"#;

fn none(browser: &mut Browser, check: &str, what: &str) {
    let found = browser.ask(check);
    assert_eq!(found, json!([]), "{what}");
}

fn keep(browser: &mut Browser, name: &str) {
    if let Some(folder) = std::env::var_os("MCL_SHOTS") {
        let folder = PathBuf::from(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("{name}.png")), browser.picture(true)).unwrap();
    }
}

/// Every page at both widths, light and dark.
fn looks(browser: &mut Browser, page: &Path, name: &str) {
    for (width, height) in [(390, 844), (1400, 900)] {
        for scheme in ["light", "dark"] {
            let state = format!("{name}-{width}-{scheme}");
            browser.scheme(scheme);
            browser.open(page, width, height);
            none(browser, WIDE, &format!("{state}: wider than the page"));
            none(browser, CONTRAST, &format!("{state}: contrast"));
            none(browser, SMALL, &format!("{state}: too small to read"));
            none(browser, CLIPPED, &format!("{state}: cut off"));
            none(browser, NAMELESS, &format!("{state}: without a name"));
            let ground = browser.ask("getComputedStyle(document.body).backgroundColor");
            assert_eq!(ground, if scheme == "dark" { "rgb(13, 17, 23)" } else { "rgb(255, 255, 255)" }, "{state}");
            // The first difference, or the first value, is seen without scrolling sideways.
            let seen = browser.ask("(()=>{const c=document.querySelector('tbody tr').cells[1].getBoundingClientRect();return c.right<=document.documentElement.clientWidth})()");
            assert_eq!(seen, true, "{state}: the second column");
            keep(browser, &state);
            assert_eq!(browser.complaints(), Vec::<String>::new(), "{state}");
        }
    }
    browser.scheme("light");
}

fn tables(browser: &mut Browser) {
    // The table with all 200 classes.
    let table = "Array.from(document.querySelectorAll('.table')).find(t=>t.textContent.includes('all 200 classes'))";
    let seen = format!("Array.from({table}.querySelectorAll('tbody tr')).filter(r=>!r.hidden)");
    let column = format!("{seen}.map(r=>Number(r.cells[1].dataset.v))");
    assert_eq!(browser.ask(&format!("{seen}.length")), 10, "long tables are folded");
    browser.click(&format!("{table}.querySelector('.more')"));
    assert_eq!(browser.ask(&format!("{seen}.length")), 200);
    browser.click(&format!("{table}.querySelectorAll('thead button')[1]"));
    let sort = format!("{table}.querySelectorAll('thead th')[1].getAttribute('aria-sort')");
    assert_eq!(browser.ask(&sort), "descending");
    let falling = format!("(()=>{{const v={column};return v.every((x,i)=>!i||v[i-1]>=x)}})()");
    assert_eq!(browser.ask(&falling), true);
    // The same by key, and back to the first row.
    browser.ask(&format!("{table}.querySelectorAll('thead button')[1].focus()"));
    browser.key("Enter");
    assert_eq!(browser.ask(&sort), "ascending");
    assert_eq!(browser.ask(&format!("(()=>{{const v={column};return v.every((x,i)=>!i||v[i-1]<=x)&&v[0]<v[v.length-1]}})()")), true);
    let arrow = format!("getComputedStyle({table}.querySelectorAll('thead button span')[1],'::after').content");
    assert!(browser.ask(&arrow).as_str().unwrap().contains('\u{25B2}'), "an arrow shows the order");
    // Words are sorted as people count: kind 2 before kind 10.
    browser.click(&format!("{table}.querySelectorAll('thead button')[0]"));
    assert_eq!(browser.ask(&format!("{seen}.slice(0,3).map(r=>r.cells[0].textContent)")), json!(["kind 0", "kind 1", "kind 2"]));
    browser.click(&format!("{table}.querySelector('input')"));
    browser.call("Input.insertText", json!({ "text": "KIND 19" }));
    assert_eq!(browser.ask(&format!("{seen}.length")), 14, "19 and 190 to 199, and 17, 188, 189, which are taken for such");
    assert_eq!(browser.ask(&format!("{table}.querySelector('output').textContent")), "14 of 200 rows");
    // The numbers behind it.
    let csv = browser.ask(&format!("atob({table}.querySelector('a[download]').href.split('base64,')[1]).split('\\n').length"));
    assert_eq!(csv, 202, "a head, 200 rows, and the end of the last line");
}

fn maps(browser: &mut Browser) {
    let figure = "document.querySelector('figure[data-map]')";
    let tip = format!("(()=>{{const t=Array.from({figure}.querySelectorAll('.tip')).find(t=>!t.hidden);return t?t.innerText:null}})()");
    browser.ask(&format!("{figure}.querySelectorAll('canvas')[0].scrollIntoView({{block:'center'}})"));
    assert_eq!(browser.ask(&format!("{figure}.querySelectorAll('.panel').length")), 2);
    assert_eq!(browser.ask(&format!("{figure}.querySelector('.still').hidden")), true);
    // Where image 119, the outermost, lies in the second panel.
    let place = |browser: &mut Browser| {
        let at = browser.ask(&format!(
            "(()=>{{const d=JSON.parse({figure}.dataset.map).panels[1].xy,b={figure}.querySelectorAll('.panel>canvas')[1].getBoundingClientRect();return [b.left+d[238]/1000*b.width,b.top+d[239]/1000*b.height]}})()"
        ));
        (at[0].as_f64().unwrap(), at[1].as_f64().unwrap())
    };
    let (x, y) = place(browser);
    browser.mouse("mouseMoved", x, y);
    let said = browser.ask(&tip);
    let said = said.as_str().expect("a point under the pointer is named");
    assert!(said.contains("kind 9") && said.contains("answer: kind") && said.contains("image 119"), "{said}");
    keep(browser, "map-hover");
    // The legend switches its class off: nothing is under the pointer any more.
    let button = format!("Array.from({figure}.querySelectorAll('.legend button')).find(b=>b.textContent==='kind 9')");
    browser.click(&button);
    assert_eq!(browser.ask(&format!("{button}.getAttribute('aria-pressed')")), "false");
    browser.ask(&format!("{figure}.querySelectorAll('canvas')[0].scrollIntoView({{block:'center'}})"));
    let (x, y) = place(browser);
    browser.mouse("mouseMoved", x, y);
    assert!(!browser.ask(&tip).as_str().unwrap_or_default().contains("kind 9"));
    browser.click(&button);
    browser.ask(&format!("{figure}.querySelectorAll('canvas')[0].scrollIntoView({{block:'center'}})"));
    // A rectangle over the first panel chooses in both.
    let b = browser
        .ask(&format!("(()=>{{const b={figure}.querySelector('.panel>canvas').getBoundingClientRect();return [b.left,b.top,b.width]}})()"));
    let (left, top, side) = (b[0].as_f64().unwrap(), b[1].as_f64().unwrap(), b[2].as_f64().unwrap());
    browser.mouse("mouseMoved", left + 2.0, top + 2.0);
    browser.mouse("mousePressed", left + 2.0, top + 2.0);
    let end = 0.4 * side;
    browser.drag(left + end / 2.0, top + end / 2.0);
    browser.drag(left + end, top + end);
    browser.mouse("mouseReleased", left + end, top + end);
    // Points within two units of an edge may lie on either side of it.
    let chosen = browser.ask(&format!("parseInt({figure}.querySelector('.chosen').textContent)"));
    let inside = |browser: &mut Browser, most: f64| {
        let found = browser.ask(&format!(
            "(()=>{{const d=JSON.parse({figure}.dataset.map).panels[0].xy;let n=0;for(let i=0;i<120;i++)if(d[2*i]<={most}&&d[2*i+1]<={most})n++;return n}})()"
        ));
        found.as_i64().unwrap()
    };
    let (least, most) = (inside(browser, 394.0), inside(browser, 406.0));
    assert!(least > 5 && (least..=most).contains(&chosen.as_i64().unwrap()), "{chosen}, wanted {least} to {most}");
    keep(browser, "map-chosen");
    // By key: an image is named, and Escape lets go of all.
    browser.ask(&format!("{figure}.querySelector('.panel>canvas').focus()"));
    browser.key("ArrowRight");
    assert!(browser.ask(&tip).as_str().is_some_and(|t| t.contains("image ")), "arrow keys go from image to image");
    browser.key("Escape");
    assert_eq!(browser.ask(&tip), Value::Null);
    assert!(!browser.ask(&format!("{figure}.querySelector('.chosen').textContent")).as_str().unwrap().contains("chosen:"));
}

/// On a phone charts are drawn for it, wide matrices scroll in their own box, and a tap on a cell tells what it is.
fn fingers(browser: &mut Browser) {
    let shown = |of: &str| format!("Array.from(document.querySelectorAll('{of}')).filter(e=>e.getBoundingClientRect().width).length");
    assert_eq!((browser.ask(&shown(".desk")), browser.ask(&shown(".phone"))), (json!(0), json!(1)), "the chart of few shots");
    let matrix = "Array.from(document.querySelectorAll('.still')).find(s=>s.textContent.includes('all others'))";
    let scrolls = browser.ask(&format!("{matrix}.scrollWidth>{matrix}.clientWidth&&{matrix}.querySelector('svg').clientWidth>560"));
    assert_eq!(scrolls, true, "a wide matrix scrolls in its box");
    let cell = format!("Array.from({matrix}.querySelectorAll('rect')).find(r=>r.textContent.includes('kind'))");
    let name = browser.ask(&format!("{cell}.textContent"));
    browser.click(&cell);
    assert_eq!(browser.ask(&format!("{matrix}.nextElementSibling.textContent")), name, "a tap tells what a cell is");
}

/// What the page itself may not do, whoever wrote the rows it was made of.
fn walls(browser: &mut Browser) {
    assert_eq!(browser.ask("document.querySelectorAll('img[src=x],b').length"), 0, "texts stay texts");
    let tried = "(async()=>{const s=document.createElement('script');s.textContent='window.ran=1';document.body.append(s);
        const f=await fetch('data:,x').then(()=>'in',()=>'refused');return [f,typeof window.ran]})()";
    assert_eq!(browser.ask(tried), json!(["refused", "undefined"]));
}

#[test]
fn the_report_page_in_a_browser() {
    let Some(program) = installed() else {
        println!("skipped: the report page in a browser: no Chromium here");
        return;
    };
    let root = tempfile::tempdir().unwrap();
    let page = report(root.path());
    let mut browser = Browser::start(&program);
    looks(&mut browser, &page, "report");
    browser.open(&page, 390, 844);
    fingers(&mut browser);
    browser.open(&page, 1400, 900);
    tables(&mut browser);
    maps(&mut browser);
    // The contents follow: the last section is marked when the page is at its end.
    browser.ask("scrollTo(0,document.body.scrollHeight)");
    browser.ask("new Promise(r=>requestAnimationFrame(()=>requestAnimationFrame(()=>r(1))))");
    let marked = browser.ask("(()=>{const a=Array.from(document.querySelectorAll('nav a'));return a.findIndex(x=>x.hasAttribute('aria-current'))===a.length-1})()");
    assert_eq!(marked, true);
    assert_eq!(browser.complaints(), Vec::<String>::new());
    walls(&mut browser);
    looks(&mut browser, Path::new("reports/evidence/report.html"), "evidence");
}
