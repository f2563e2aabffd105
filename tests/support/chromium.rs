//! A headless Chromium, spoken to over a pipe (the DevTools protocol), where one is installed.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use base64::Engine as _;
use serde_json::{Value, json};

/// How long an answer may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A page in a browser of its own.
pub struct Browser {
    child: Child,
    to: File,
    from: Receiver<Value>,
    next: u64,
    session: Option<String>,
    /// What the page did, in order.
    pub events: Vec<Value>,
    _profile: tempfile::TempDir,
}

/// Chromium or Chrome, where it is usually found.
pub fn installed() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let path = std::env::var_os("PATH")?;
    let mut all = std::env::split_paths(&path).flat_map(|folder| names.map(|name| folder.join(name)));
    all.find(|file| file.is_file())
}

fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends: [RawFd; 2] = [0; 2];
    // SAFETY: the array has room for both ends, and each is owned once.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0, "a pipe");
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

impl Browser {
    /// Starts `program` with an empty profile and opens an empty page.
    pub fn start(program: &Path) -> Browser {
        use std::os::fd::AsRawFd;
        let profile = tempfile::tempdir().unwrap();
        let ((their_in, our_out), (our_in, their_out)) = (pipe(), pipe());
        let (read, write) = (their_in.as_raw_fd(), their_out.as_raw_fd());
        let mut command = Command::new(program);
        command
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // SAFETY: only calls that are safe between fork and exec. Chromium reads from 3 and writes to 4.
        unsafe {
            command.pre_exec(move || {
                let (read, write) = (libc::fcntl(read, libc::F_DUPFD, 10), libc::fcntl(write, libc::F_DUPFD, 10));
                if libc::dup2(read, 3) < 0 || libc::dup2(write, 4) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().expect("the browser starts");
        drop((their_in, their_out));
        let (send, from) = channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(File::from(our_in));
            let mut message = vec![];
            while reader.read_until(0, &mut message).is_ok_and(|n| n > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { break };
                if send.send(value).is_err() {
                    break;
                }
                message.clear();
            }
        });
        let mut browser = Browser { child, to: File::from(our_out), from, next: 0, session: None, events: vec![], _profile: profile };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let session = browser.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = session["sessionId"].as_str().map(String::from);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Asks for something and waits for the answer.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).expect("the browser listens");
        loop {
            let answer = self.from.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("{method}: the browser does not answer ({e})"));
            if answer["id"] == json!(self.next) {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// Opens a file in a window of this size and waits until it is loaded.
    pub fn open(&mut self, page: &Path, width: u32, height: u32) {
        let phone = width < 600;
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone });
        self.call("Emulation.setDeviceMetricsOverride", size);
        self.events.clear();
        self.call("Page.navigate", json!({ "url": format!("file://{}", page.canonicalize().unwrap().display()) }));
        while !self.events.iter().any(|e| e["method"] == "Page.loadEventFired") {
            let event = self.from.recv_timeout(PATIENCE).expect("the page is loaded");
            self.events.push(event);
        }
    }

    /// Light or dark, as the reader's system would say.
    pub fn scheme(&mut self, name: &str) {
        self.call("Emulation.setEmulatedMedia", json!({ "features": [{ "name": "prefers-color-scheme", "value": name }] }));
    }

    /// The value of an expression; promises are waited for.
    pub fn ask(&mut self, expression: &str) -> Value {
        let asked = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// A mouse event: `mouseMoved`, `mousePressed`, `mouseReleased`.
    pub fn mouse(&mut self, kind: &str, x: f64, y: f64) {
        let button = if kind == "mouseMoved" { "none" } else { "left" };
        self.call("Input.dispatchMouseEvent", json!({ "type": kind, "x": x, "y": y, "button": button, "clickCount": 1 }));
    }

    /// Moves with the button held.
    pub fn drag(&mut self, x: f64, y: f64) {
        self.call("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": x, "y": y, "button": "left", "buttons": 1 }));
    }

    /// Clicks the middle of the first element that the expression names, after bringing it into view.
    pub fn click(&mut self, element: &str) {
        let place = self.ask(&format!(
            "(()=>{{const e={element};e.scrollIntoView({{block:'center',inline:'center'}});const b=e.getBoundingClientRect();return [b.left+b.width/2,b.top+b.height/2]}})()"
        ));
        let (x, y) = (place[0].as_f64().unwrap(), place[1].as_f64().unwrap());
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"] {
            self.mouse(kind, x, y);
        }
    }

    /// A key, pressed and let go.
    pub fn key(&mut self, key: &str) {
        let code = match key {
            "Enter" => 13,
            "Escape" => 27,
            "ArrowRight" => 39,
            _ => 0,
        };
        let text = if key == "Enter" { "\r" } else { "" };
        self.call(
            "Input.dispatchKeyEvent",
            json!({ "type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text }),
        );
        self.call("Input.dispatchKeyEvent", json!({ "type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code }));
    }

    /// Errors, and requests for anything but the page itself and what stands in it.
    pub fn complaints(&mut self) -> Vec<String> {
        // What is under way is heard before the answer.
        self.ask("1");
        let told = |e: &Value| {
            let p = &e["params"];
            match e["method"].as_str()? {
                "Runtime.exceptionThrown" => Some(p["exceptionDetails"].to_string()),
                "Log.entryAdded" if p["entry"]["level"] == "error" => Some(p["entry"].to_string()),
                "Network.requestWillBeSent" => {
                    let url = p["request"]["url"].as_str()?;
                    (!url.starts_with("data:") && p["type"] != "Document").then(|| format!("asked for {url}"))
                }
                _ => None,
            }
        };
        self.events.iter().filter_map(told).collect()
    }

    /// What the window shows, or the whole page, as PNG.
    pub fn picture(&mut self, whole: bool) -> Vec<u8> {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png", "captureBeyondViewport": whole }));
        base64::engine::general_purpose::STANDARD.decode(shot["data"].as_str().unwrap()).unwrap()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
