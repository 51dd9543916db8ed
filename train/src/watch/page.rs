//! The page of a folder of runs: live, asking its server for what is new, or as one file with everything in it.

use super::details::{details, picture, series};
use super::{Figures, Found, declared, problem, summary};
use crate::Recipes;
use crate::page::Page;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

const STYLE: &str = include_str!("watch.css");
const SCRIPT: &str = include_str!("watch.js");
const BODY: &str = include_str!("watch.html");

/// The page that `server.rs` serves.
pub fn live(title: &str) -> String {
    let mut page = Page::new(title);
    page.own(STYLE, SCRIPT).raw(BODY).served()
}

/// Runs with all that a page shows of them.
pub fn report(runs: &[Found], title: &str, recipes: Recipes) -> String {
    let mut left = Left { pictures: ALL_PICTURES, bytes: ALL_BYTES, runs: runs.len() };
    let all: Vec<Value> = runs.iter().map(|found| left.fitting(found, recipes)).collect();
    let mut page = Page::new(title);
    page.own(STYLE, SCRIPT)
        .raw(BODY)
        .data("report", &json!({ "runs": all, "written": super::now(), "version": env!("CARGO_PKG_VERSION") }));
    page.html()
}

/// Pictures are in a file as long as they have no more together, and runs with all that is known of them; of those that have no room there is a line.
const ALL_PICTURES: usize = 32 << 20;
const ALL_BYTES: usize = 256 << 20;

/// What a file has room for.
struct Left {
    pictures: usize,
    bytes: usize,
    runs: usize,
}

impl Left {
    fn fitting(&mut self, found: &Found, recipes: Recipes) -> Value {
        let mut whole = whole(found, recipes, self);
        let bytes = whole.to_string().len();
        match self.bytes.checked_sub(bytes) {
            Some(left) => self.bytes = left,
            None => {
                let note = "this file has no more room: make one of this run alone for its curves, settings and pictures";
                let none = json!({ "settings": {}, "samples": [], "pictures": [], "inside": {}, "metrics": {}, "notes": [note] });
                (whole["details"], whole["series"]) = (none, json!({}));
            }
        }
        whole
    }
}

fn whole(found: &Found, recipes: Recipes, left: &mut Left) -> Value {
    let mut figures = Figures::default();
    let summary = summary(found, &mut figures, recipes);
    let mut details = details(found, &figures, recipes);
    let (mut inside, mut notes) = (Map::new(), vec![]);
    let names: Vec<String> = details["pictures"].as_array().into_iter().flatten().filter_map(|n| n.as_str().map(String::from)).collect();
    for name in names {
        match found.folder().and_then(|run| picture(&run, &name)) {
            Ok((kind, bytes)) if bytes.len() <= left.pictures => {
                left.pictures -= bytes.len();
                inside.insert(name, format!("data:{kind};base64,{}", STANDARD.encode(bytes)).into());
            }
            Ok(_) => notes.push(format!("{name} is not in this file: its pictures are too many or too large")),
            Err(e) => notes.push(problem(&name, &e)),
        }
    }
    // What `summary` says of metrics.jsonl is not said again.
    let metrics = declared(recipes, &summary.recipe);
    let series = found.folder().and_then(|run| series(&run, &mut figures, metrics, left.runs)).unwrap_or_default();
    details["pictures"] = inside.keys().cloned().collect();
    details["inside"] = inside.into();
    details["notes"].as_array_mut().into_iter().for_each(|all| all.extend(notes.drain(..).map(Value::from)));
    json!({ "summary": summary, "details": details, "series": series })
}
