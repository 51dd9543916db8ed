//! `kiln runs`, `kiln watch` and `kiln report`: what they say of runs is what the runs' files say, and the page is for this machine alone.

use crate::common::*;
use kiln::recipes::RECIPES;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;
use tempfile::tempdir;

pub fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn listed(folder: &Path) -> Vec<Value> {
    json(&kiln(["runs", &text(folder), "--json"]).ok().out).as_array().unwrap().clone()
}

#[test]
fn runs_say_how_they_are_doing() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    train(&at("done"), "--steps 6 --set eval_every=2 --set log_every=2").ok();
    let long = |name: &str| {
        let run = at(name);
        let mut child = start_in_foreground(train_args(&run, "--steps 100000 --set eval_every=100000 --set log_every=1"));
        wait_until(&mut child, || fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|t| t.lines().count() > 2));
        child
    };
    // Sorted into a folder of its own; a folder of settings alone is no run.
    let (stopped, mut killed) = (long("more/stopped"), long("killed"));
    fs::create_dir(at("preset")).unwrap();
    fs::copy(at("done/config.toml"), at("preset/config.toml")).unwrap();
    signal(&stopped, "INT");
    assert_eq!(end(stopped).code, Some(130));
    let status = |name: &str| listed(dir.path()).into_iter().find(|r| r["name"] == name).map(|r| r["status"].as_str().unwrap().to_string());
    assert_eq!(status("killed").as_deref(), Some("running"));
    killed.kill().unwrap();
    killed.wait().unwrap();
    train(&at("broken"), "--steps 3000 --set learning_rate=1e6 --set clip=1e30 --set warmup=0 --set log_every=1").fails(&["not finite"]);

    let all = listed(dir.path());
    let seen: Vec<(&str, &str)> = all.iter().map(|r| (r["name"].as_str().unwrap(), r["status"].as_str().unwrap())).collect();
    assert_eq!(seen, [("broken", "failed"), ("done", "finished"), ("killed", "failed"), ("more/stopped", "stopped")]);
    assert!(all[0]["problem"].as_str().unwrap().contains("not finite") && all[2]["problem"].as_str().unwrap().contains("killed"));

    // The numbers are those of the run's own file.
    let (done, records) = (&all[1], records(&at("done"), "train"));
    let best = records.iter().min_by(|a, b| a["val_loss"].as_f64().unwrap().total_cmp(&b["val_loss"].as_f64().unwrap())).unwrap();
    assert_eq!(
        (&done["best"]["value"], &done["best"]["step"], &done["best"]["metric"]),
        (&best["val_loss"], &best["step"], &"loss".into())
    );
    let mut speeds: Vec<f64> = records.iter().map(|r| r["per_second"].as_f64().unwrap()).collect();
    speeds.sort_by(f64::total_cmp);
    assert_eq!(done["per_second"], speeds[speeds.len() / 2], "of {speeds:?}");
    assert_eq!((&done["step"], &done["steps"], &done["recipe"], &done["work"]), (&6.into(), &6.into(), &"hydra".into(), &"tok".into()));
    let table = kiln(["runs", &text(dir.path())]).ok().out;
    let row = table.lines().find(|l| l.starts_with("done ")).unwrap();
    for part in ["finished", "hydra tiny", "6 of 6", "loss ", " tok/s"] {
        assert!(row.contains(part), "{part}: {table}");
    }

    // What an earlier version left has no run.json, and a damaged one says nothing but that.
    for damage in [None, Some("{")] {
        damage.map_or_else(|| fs::remove_file(at("done/run.json")).unwrap(), |text| fs::write(at("killed/run.json"), text).unwrap());
    }
    assert_eq!((status("done").as_deref(), status("killed").as_deref()), (Some("finished"), Some("stopped")));
    // A run that goes on is running again, and then what it became.
    resume(&at("more/stopped"), "--steps 1").ok();
    kiln(["runs", &text(&at("nowhere"))]).fails(&["nowhere", "train --out"]);
    assert!(kiln(["runs", &text(&at("preset"))]).ok().out.contains("no runs in"));
}

/// A server on a free port, ended with the test.
pub struct Served {
    child: Child,
    pub host: String,
    /// What the address ends in: `token=..`, or nothing.
    pub token: String,
}

impl Served {
    pub fn new(folder: &Path) -> Served {
        Served::with(folder, &[])
    }

    pub fn with(folder: &Path, more: &[&str]) -> Served {
        Served::of(folder, more, &[])
    }

    /// With more flags, and variables of its environment.
    pub fn of(folder: &Path, more: &[&str], variables: &[(&str, &str)]) -> Served {
        let folder = text(folder);
        let mut watch = command(["watch", folder.as_str(), "--port", "0"].iter().chain(more));
        let mut child = watch.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split_whitespace().next().unwrap_or_else(|| panic!("{line}"));
        let (host, token) = address.strip_prefix("http://").and_then(|a| a.split_once('/')).unwrap_or_else(|| panic!("{line}"));
        Served { host: host.into(), token: token.trim_start_matches('?').into(), child }
    }

    /// Status, headers and body of the answer to these lines.
    pub fn send(&self, request: &str) -> (u16, String, Vec<u8>) {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut bytes = vec![];
        stream.read_to_end(&mut bytes).unwrap();
        let at = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("{request}: {bytes:?}"));
        let head = String::from_utf8(bytes[..at].to_vec()).unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), head, bytes[at + 4..].to_vec())
    }

    pub fn get(&self, path: &str) -> (u16, String, Vec<u8>) {
        self.ask(path, &self.token, &self.host)
    }

    /// With this token, and under this name.
    pub fn ask(&self, path: &str, token: &str, host: &str) -> (u16, String, Vec<u8>) {
        let and = if path.contains('?') { '&' } else { '?' };
        self.send(&format!("GET {path}{and}{token} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    }

    pub fn json(&self, path: &str) -> Value {
        let (status, head, body) = self.get(path);
        assert!(status == 200 && head.contains("application/json"), "{path}: {head}");
        json(&String::from_utf8(body).unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_page_is_for_this_machine_and_for_runs_alone() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("runs/a b");
    let args = train_args(Path::new("RUN"), "--steps 4 --set log_every=1").into_iter().map(|a| if a == "RUN" { text(&run) } else { a });
    kiln(args).ok();
    fs::write(dir.path().join("secret.svg"), "secret").unwrap();
    std::os::unix::fs::symlink(dir.path().join("secret.svg"), run.join("link.svg")).unwrap();
    fs::write(run.join("own.svg"), "<svg/>").unwrap();
    let served = Served::new(&dir.path().join("runs"));

    // Browsers open connections that they may never use, and people send nonsense: neither is in the way of others.
    let idle: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(&served.host).unwrap()).collect();
    assert_eq!(served.send("nonsense\r\n\r\n").0, 400);
    let (status, head, page) = served.get("/");
    drop(idle);
    assert!(status == 200 && head.contains("text/html") && String::from_utf8(page).unwrap().contains("<h1>Runs</h1>"), "{head}");
    assert_eq!(
        served.json("/api/runs")["runs"].as_array().unwrap(),
        &listed(&dir.path().join("runs")),
        "the page has what kiln runs --json has"
    );
    let details = served.json("/api/details?run=a%20b");
    assert_eq!(details["pictures"], serde_json::json!(["own.svg"]), "a link is no picture of the run, and the page draws the loss itself");
    assert_eq!((&details["metrics"]["val_loss"]["better"], &details["metrics"]["val_loss"]["of"]), (&"lower".into(), &"validation".into()));
    assert!(details["changed"].as_array().unwrap().iter().any(|c| c["key"] == "model.dim" && c["value"] == 32), "{}", details["changed"]);
    let (status, head, picture) = served.get("/picture?run=a%20b&name=own.svg");
    assert!(status == 200 && head.contains("image/svg+xml") && head.contains("sandbox") && head.contains("nosniff"), "{head}");
    assert_eq!(picture, fs::read(run.join("own.svg")).unwrap());

    // The numbers of metrics.jsonl come in parts that make up the whole.
    let whole = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let points = |text: &str| {
        let mut all = serde_json::Map::new();
        for record in text.lines().map(json) {
            for (key, value) in record.as_object().unwrap().iter().filter(|(key, value)| *key != "step" && value.is_number()) {
                let points = all.entry(key.clone()).or_insert_with(|| Value::Array(vec![]));
                points.as_array_mut().unwrap().push(serde_json::json!([record["step"], value]));
            }
        }
        Value::Object(all)
    };
    let first = served.json("/api/metrics?run=a%20b&from=0");
    assert_eq!((&first["points"], first["next"].as_u64().unwrap()), (&points(&whole), whole.len() as u64));
    let cut = whole.find('\n').unwrap() + 1;
    let line = "{\"step\":5,\"loss\":1.5}\n";
    // A line that is being written is not there yet.
    fs::write(run.join("metrics.jsonl"), format!("{whole}{line}{{\"step\":6")).unwrap();
    let rest = served.json(&format!("/api/metrics?run=a%20b&from={cut}"));
    assert_eq!(
        (&rest["points"], rest["next"].as_u64().unwrap()),
        (&points(&format!("{}{line}", &whole[cut..])), (whole.len() + line.len()) as u64)
    );
    assert_eq!(served.json("/api/runs")["runs"][0]["step"], 5);

    // Nothing but runs and what of them is listed.
    let none = [
        "/secret.svg",
        "/../secret.svg",
        "/picture?run=a%20b&name=link.svg",
        "/picture?run=a%20b&name=..%2F..%2Fsecret.svg",
        "/picture?run=a%20b&name=config.toml",
    ];
    let more = [
        "/picture?run=..&name=secret.svg",
        "/api/details?run=..",
        "/api/details?run=%2Fetc",
        "/api/metrics?run=..%2Fruns%2Fa%20b&from=0",
        "/api/details",
    ];
    for path in none.iter().chain(&more) {
        assert_eq!(served.get(path).0, 404, "{path}");
    }
    for path in ["/api/metrics?run=a%20b&from=x", "/api/metrics?run=a%20b&from=-1", "/api/details?run=%zz"] {
        assert_eq!(served.get(path).0, 400, "{path}");
    }
    // Only to whoever names this address, and only to read: a name that was made to lead here (DNS rebinding) is refused.
    let (host, token) = (&served.host, &served.token);
    let port = host.split(':').nth(1).unwrap();
    for foreign in
        [format!("Host: evil.example:{port}\r\n"), "Host: 127.0.0.1\r\n".into(), format!("Host: {host}.evil.example\r\n"), String::new()]
    {
        assert_eq!(served.send(&format!("GET /api/runs?{token} HTTP/1.1\r\n{foreign}Connection: close\r\n\r\n")).0, 403, "{foreign}");
    }
    assert_eq!(served.ask("/", token, &format!("LocalHost:{port}")).0, 200);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let (status, head, _) =
            served.send(&format!("{method} /?{token} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"));
        assert!(status == 405 && head.contains("Allow: GET"), "{method}: {head}");
    }
    kiln(["watch", &text(&dir.path().join("runs")), "--port", port]).fails(&["cannot serve on 127.0.0.1", "--port"]);
    kiln(["watch", &text(&dir.path().join("none"))]).fails(&["none"]);
}

#[test]
fn only_who_has_the_token_is_let_in() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("runs/a");
    train(&run, "--steps 2").ok();
    fs::write(run.join("own.svg"), "<svg/>").unwrap();
    let folder = dir.path().join("runs");
    let (served, other) = (Served::new(&folder), Served::new(&folder));
    let random = served.token.strip_prefix("token=").unwrap_or_else(|| panic!("{}", served.token));
    assert!(random.len() * 4 >= 128 && random.bytes().all(|b| b.is_ascii_hexdigit()) && served.token != other.token, "{random}");
    let paths = ["/", "/api/runs", "/api/details?run=a", "/api/metrics?run=a&from=0", "/picture?run=a&name=own.svg"];
    let wrong = ["", "token=", &format!("token={}", &random[1..]), &format!("token={random}0"), &format!("Token={random}"), &other.token];
    for path in paths.iter().chain(&["/nothing"]) {
        for token in wrong {
            let (status, _, body) = served.ask(path, token, &served.host);
            let said = String::from_utf8(body).unwrap();
            assert!(
                status == 403 && said.contains("token") && said.contains("terminal") && !said.contains(random),
                "{path} {token}: {said}"
            );
        }
    }
    assert!(paths.iter().all(|path| served.get(path).0 == 200));
    assert_eq!(served.get("/nothing").0, 404);

    // Without one, only this machine is served, and only under its own name.
    let open = Served::with(&folder, &["--no-token"]);
    assert_eq!((open.token.as_str(), open.get("/api/runs").0, open.ask("/api/runs", "", "evil.example:80").0), ("", 200, 403));
    for host in ["0.0.0.0", "::"] {
        kiln(["watch", &text(&folder), "--port", "0", "--host", host, "--no-token"]).fails(&["--no-token", host]);
    }
    kiln(["watch", &text(&folder), "--port", "0", "--host", "no.such.host.invalid"]).fails(&["--host no.such.host.invalid"]);
}

#[test]
fn a_page_for_other_machines_is_served_where_it_is_asked_for() {
    let dir = tempdir().unwrap();
    // On all addresses: under any name, and the token alone lets in.
    let mut all = Served::with(dir.path(), &["--host", "0.0.0.0"]);
    let port = all.host.rsplit(':').next().unwrap().to_string();
    all.host = format!("127.0.0.1:{port}");
    for name in [format!("gpu1:{port}"), "gpu1.example".into(), all.host.clone()] {
        assert_eq!((all.ask("/api/runs", &all.token, &name).0, all.ask("/api/runs", "", &name).0), (200, 403), "{name}");
    }
    kiln(["watch", &text(dir.path()), "--host", "127.1", "--port", &port]).fails(&[
        "127.1 is 127.0.0.1 on this machine",
        "--host 0.0.0.0",
        &format!("cannot serve on 127.1:{port}"),
    ]);
    // On one: under the name that it was asked for as, and its number.
    let one = Served::with(dir.path(), &["--host", "localhost"]);
    let port = one.host.strip_prefix("localhost:").unwrap_or_else(|| panic!("{}", one.host));
    let number = if TcpStream::connect(format!("127.0.0.1:{port}")).is_ok() { "127.0.0.1" } else { "[::1]" };
    for (name, status) in [(format!("localhost:{port}"), 200), (format!("{number}:{port}"), 200), (format!("evil.example:{port}"), 403)] {
        assert_eq!(one.ask("/", &one.token, &name).0, status, "{name}");
    }
}

/// What is embedded under an id.
pub fn embedded(html: &str, id: &str) -> Value {
    json(html.split(&format!("id=\"{id}\">")).nth(1).unwrap().split("</script>").next().unwrap())
}

#[test]
fn a_report_stands_alone_and_has_the_numbers_of_the_run() {
    let dir = tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
    train(&a, "--steps 6 --set eval_every=3 --set log_every=1").ok();
    train(&b, "--steps 3 --set log_every=1 --seed 7").ok();
    fs::write(a.join("own.svg"), "<svg/>").unwrap();
    let sample = "</script><script>alert('x')</script>\u{2028}<!--";
    kiln::run::note_sample(&a, 3, "first").unwrap();
    kiln::run::note_sample(&a, 6, sample).unwrap();
    let out = dir.path().join("both.html");
    kiln(["report", &text(&a), &text(&b)]).fails(&["--out"]);
    kiln(["report", &text(&a), &text(&b), &text(&a), "--out", &text(&out)]).ok();
    let html = fs::read_to_string(&out).unwrap();
    let places = html.replace("http://www.w3.org/2000/svg", "");
    for way in ["http:", "https:", "connect-src", "@import", sample, "alert('x')</script>"] {
        assert!(!places.contains(way), "{way}");
    }
    assert!(html.contains("Content-Security-Policy\" content=\"default-src 'none'"));
    let report = embedded(&html, "report");
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(
        runs.iter().map(|r| r["summary"].clone()).collect::<Vec<_>>(),
        listed(dir.path()),
        "a run that is named twice is there once"
    );
    let own = &runs[0];
    assert_eq!(
        *own["details"]["samples"].as_array().unwrap().last().unwrap(),
        serde_json::json!({ "step": 6, "text": sample.replace('\u{2028}', " ") })
    );
    // Every number of every record, to the last digit.
    let mut numbers = 0;
    for record in records(&a, "train") {
        for (key, value) in record.as_object().unwrap().iter().filter(|(k, v)| *k != "step" && v.is_number()) {
            let point = own["series"][key].as_array().unwrap().iter().find(|p| p[0] == record["step"]).unwrap();
            assert_eq!(&point[1], value, "{key}");
            numbers += 1;
        }
    }
    assert!(numbers > 30 && own["series"]["val_loss"].as_array().unwrap().len() == 2, "{numbers}");
    assert_eq!(own["details"]["receipts"], json(&fs::read_to_string(a.join("receipts.json")).unwrap()));
    assert!(own["details"]["inside"]["own.svg"].as_str().unwrap().starts_with("data:image/svg+xml;base64,"));
    assert!(own["details"]["inside"]["loss.svg"].is_null(), "the page draws it");
    // Of one run, the file lies beside it.
    kiln(["report", &text(&b)]).ok();
    assert_eq!(embedded(&fs::read_to_string(b.join("report.html")).unwrap(), "report")["runs"][0]["summary"]["name"], "b");
    kiln(["report", &text(&dir.path().join("nowhere"))]).fails(&["nowhere"]);
    // A run's own files are no pages.
    let metrics = fs::read(b.join("metrics.jsonl")).unwrap();
    kiln(["report", &text(&b), "--out", &text(&b.join("metrics.jsonl"))]).fails(&["metrics.jsonl: a page's name ends in .html"]);
    fs::copy(b.join("metrics.jsonl"), dir.path().join("other.html")).unwrap();
    kiln(["report", &text(&b), "--out", &text(&dir.path().join("other.html"))]).fails(&["that is no page"]);
    assert_eq!(fs::read(b.join("metrics.jsonl")).unwrap(), metrics);
    kiln(["report", &text(&b)]).ok();
}

#[test]
fn every_metric_of_every_recipe_says_what_it_means() {
    for recipe in RECIPES {
        let metrics = recipe.metrics();
        assert!(!metrics.is_empty(), "{}", recipe.name());
        for (i, m) in metrics.iter().enumerate() {
            let at = format!("{}: {}", recipe.name(), m.name);
            assert!(
                m.about.split_whitespace().count() >= 3 && m.about.is_ascii() && !m.about.contains('\n') && !m.about.ends_with('.'),
                "{at}: {}",
                m.about
            );
            assert!(metrics[..i].iter().all(|other| other.name != m.name), "{at} is there twice");
            // Whatever has a direction in a table has it in the words of the plots.
            assert_eq!(m.better.words().is_none(), m.better == kiln::recipe::Better::Neither, "{at}");
        }
        let said = kiln(["recipes", recipe.name()]).ok().out;
        let row =
            |name: &str| said.lines().rev().find(|l| l.split_whitespace().next() == Some(name)).unwrap_or_else(|| panic!("{name}: {said}"));
        assert!(metrics.iter().all(|m| row(m.name).contains(m.about) && row(m.name).contains(m.better.name())), "{said}");
        let described = json(&kiln(["recipes", recipe.name(), "--json"]).ok().out);
        assert!(metrics.iter().all(|m| described[0]["metrics"][m.name]["about"] == m.about), "{described}");
    }
    kiln(["recipes", "hydar"]).fails(&["hydar", "hydra"]);
}

#[test]
fn a_run_ends_with_its_figures_and_what_they_mean() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    let said = train(&run, "--steps 2").ok().out;
    let last = records(&run, "train").pop().unwrap();
    let row =
        |name: &str| said.lines().rev().find(|l| l.split_whitespace().next() == Some(name)).unwrap_or_else(|| panic!("{name}: {said}"));
    let shown = |key: &str| format!("{:.4}", last[key].as_f64().unwrap());
    for part in [&shown("loss"), &shown("val_loss"), "lower", "cross-entropy of the next token"] {
        assert!(row("loss").contains(part), "{part}: {said}");
    }
    assert!(row("router").contains(" - "), "an evaluation finds none: {said}");
    let picture = fs::read_to_string(run.join("loss.svg")).unwrap();
    assert!(picture.contains("loss (nats, lower is better)") && picture.contains("cross-entropy of the next token"));
}

#[test]
fn shells_and_man_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = kiln(["completions", shell]).ok().out;
        assert!(script.contains("watch") && script.contains("memory-budget"), "{shell}");
    }
    kiln(["completions", "tcsh"]).fails(&["tcsh"]);
    let dir = tempdir().unwrap();
    let out = dir.path().join("man/man1");
    kiln(["man", "--out", &text(&out)]).ok();
    let page = fs::read_to_string(out.join("kiln-train.1")).unwrap();
    assert!(page.contains(".TH kiln-train 1") && page.contains("memory\\-budget"), "{page}");
    assert!(names(&out).contains(&"kiln.1".to_string()) && names(&out).contains(&"kiln-data-prepare.1".to_string()), "{:?}", names(&out));
    fs::write(dir.path().join("file"), "").unwrap();
    kiln(["man", "--out", &text(&dir.path().join("file"))]).fails(&["file"]);
}

/// `pip install 'kiln[cuda]'` brings every library that kiln would say is missing.
#[test]
fn the_extra_cuda_of_the_wheel_has_what_kiln_loads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let project: toml::Table = read("pyproject.toml").parse().unwrap();
    let extra: Vec<String> = project["project"]["optional-dependencies"]["cuda"].clone().try_into().unwrap();
    let libraries = read("engine/src/cuda/libraries.rs");
    let named: Vec<&str> = libraries.split("\\\"").filter(|part| part.starts_with("nvidia-")).collect();
    assert!(named.len() >= 2, "{named:?}");
    for wheel in named {
        assert!(extra.iter().any(|e| e == wheel), "{wheel} is not in the extra cuda: {extra:?}");
    }
    assert_eq!(project["tool"]["maturin"]["manifest-path"].as_str(), Some("train/Cargo.toml"));
}
