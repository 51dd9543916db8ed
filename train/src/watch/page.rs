//! The page of a folder of runs: live, asking its server for what is new, or as one file with everything in it.

use super::details::{details, picture, series};
use super::{Figures, Found, summary};
use crate::Recipes;
use crate::page::Page;
use crate::recipe::TrainError;
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
pub fn report(runs: &[Found], title: &str, recipes: Recipes) -> Result<String, TrainError> {
    let all = runs.iter().map(|found| whole(found, recipes)).collect::<Result<Vec<_>, _>>()?;
    let mut page = Page::new(title);
    page.own(STYLE, SCRIPT)
        .raw(BODY)
        .data("report", &json!({ "runs": all, "written": super::now(), "version": env!("CARGO_PKG_VERSION") }));
    Ok(page.html())
}

fn whole(found: &Found, recipes: Recipes) -> Result<Value, TrainError> {
    let mut figures = Figures::default();
    let summary = summary(found, &mut figures, recipes);
    let mut details = details(found, &figures, recipes);
    let names: Vec<String> = details["pictures"].as_array().into_iter().flatten().filter_map(|n| n.as_str().map(String::from)).collect();
    let inside = |name: &String| {
        let (kind, bytes) = picture(&found.path, name).ok()?;
        Some((name.clone(), format!("data:{kind};base64,{}", STANDARD.encode(bytes)).into()))
    };
    details["inside"] = Value::Object(names.iter().filter_map(inside).collect::<Map<_, _>>());
    Ok(json!({ "summary": summary, "details": details, "series": series(&found.path)? }))
}
