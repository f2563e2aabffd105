//! A report is given to others, and the rows it is made of are text that anybody may have written: nothing outside the reported folders gets
//! into it, and nothing in it runs.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;

/// A report on a folder of results, as (page, Markdown).
fn report(root: &Path) -> (String, String) {
    let made = Command::new(env!("CARGO_BIN_EXE_mcl-eval"))
        .args(["report", "--results", "results", "--out", "out", "--title", "<img src=x onerror=alert(1)>"])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let read = |name: &str| fs::read_to_string(root.join("out").join(name)).unwrap();
    (read("report.html"), read("report.md"))
}

fn row(figure: &Path) -> String {
    let caption = "a <script>alert(2)</script> map, see [this](http://elsewhere) `now`";
    let row = json!({ "command": "tsne", "dataset": "<b>bold</b>", "subject": "a|b", "metric": "top1", "value": 1.0,
        "detail": { "figures": [{ "svg": figure, "caption": caption }] } });
    format!("{row}\n")
}

#[test]
fn pictures_come_from_the_reported_folder_alone_and_nothing_in_them_runs() {
    let root = tempfile::tempdir().unwrap();
    let results = root.path().join("results");
    fs::create_dir_all(results.join("figures")).unwrap();
    let svg = |text: &str| format!("<svg xmlns=\"http://www.w3.org/2000/svg\"><script>{text}</script></svg>");
    fs::write(root.path().join("secret.svg"), svg("outside_one")).unwrap();
    fs::write(root.path().join("secret.txt"), "outside_two").unwrap();
    fs::write(results.join("figures/own.svg"), svg("own_script")).unwrap();
    std::os::unix::fs::symlink(root.path().join("secret.svg"), results.join("figures/link.svg")).unwrap();
    // A map beside a picture is read from the folder alone, too.
    let map = json!({ "classes": ["outside_three"], "images": [0], "labels": [0], "answered_by": "",
        "panels": [{ "name": "a", "title": "a", "note": "", "points": [[0.0, 0.0]], "answers": [] }] });
    fs::write(root.path().join("secret.json"), map.to_string()).unwrap();
    std::os::unix::fs::symlink(root.path().join("secret.json"), results.join("figures/own.json")).unwrap();
    let named =
        ["secret.svg", "secret.txt", "results/../secret.svg", "results/figures/link.svg", "results/figures/own.svg", "/etc/hostname"];
    fs::write(results.join("results.jsonl"), named.map(|name| row(&root.path().join(name))).concat()).unwrap();
    let (html, markdown) = report(root.path());
    for outside in ["outside_one", "outside_two", "outside_three"] {
        assert!(!html.contains(outside) && !markdown.contains(outside), "{outside} got into the report");
    }
    // The one picture of the folder is there, as an image: scripts of an image do not run.
    assert_eq!((html.matches("<img ").count(), html.matches("src=\"data:image/svg+xml;base64,").count()), (1, 1));
    // A browser is told to load nothing and to run the page's own script alone.
    let policy = html.split_once("Content-Security-Policy\" content=\"").unwrap().1.split_once('"').unwrap().0;
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
    assert!(!html.contains("own_script"), "a script of a picture stands in the page");
    assert!(!html.contains("<script>alert") && !html.contains("<img src=x") && !html.contains("<b>bold"));
    // Markdown is shown as HTML by whoever reads it.
    assert!(!markdown.contains("<script") && !markdown.contains("<img") && !markdown.contains("<b>"), "{markdown}");
    assert!(markdown.contains("[this]\\(http://elsewhere)") && !markdown.contains("](http"), "{markdown}");
    assert_eq!(fs::read_dir(root.path().join("out/figures")).unwrap().count(), 1);
}
