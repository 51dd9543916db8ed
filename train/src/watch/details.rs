//! What a page shows of a run beside its curves.

use super::{Figures, Found, declared};
use crate::Recipes;
use crate::config::{self, Config};
use crate::recipe::{self, Metric, Of};
use crate::run::SAMPLES;
use crate::{input, metrics};
use serde_json::{Map, Value, json};
use std::io;
use std::path::Path;

/// Settings, what of them is not the preset's, receipts, samples, pictures, and what the keys of metrics.jsonl mean.
pub fn details(found: &Found, figures: &Figures, recipes: Recipes) -> Value {
    let table = config::read_file(&found.path.join("config.toml")).ok();
    let settings = table.as_ref().map(|t| flat(&json!(t))).unwrap_or_default();
    let named = |key: &str| settings.get(key).and_then(|v| v.as_str()).unwrap_or_default();
    let preset = recipe::find_in(recipes, named("recipe")).ok().and_then(|r| recipe::preset(r, Some(named("preset"))).ok());
    let text = |name: &str| input::read_to_string(&found.path.join(name)).unwrap_or_default();
    let metrics = declared(recipes, named("recipe"));
    json!({
        "changed": preset.map(|preset| changed(&settings, &preset)),
        "settings": settings,
        "receipts": serde_json::from_str::<Value>(&text("receipts.json")).unwrap_or(Value::Null),
        "samples": text(SAMPLES).lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()).collect::<Vec<_>>(),
        "pictures": pictures(&found.path),
        "metrics": figures.keys().map(|key| (key.to_string(), meaning(metrics, key))).collect::<Map<_, _>>(),
    })
}

/// `train.steps = 60`: every key with its value, as JSON.
fn flat(value: &Value) -> Map<String, Value> {
    let mut all = Map::new();
    for (key, value) in value.as_object().into_iter().flatten() {
        match value.as_object() {
            Some(section) => all.extend(section.iter().map(|(name, value)| (format!("{key}.{name}"), value.clone()))),
            None => drop(all.insert(key.clone(), value.clone())),
        }
    }
    all
}

/// Keys whose value is not the preset's.
fn changed(settings: &Map<String, Value>, preset: &Config) -> Vec<Value> {
    let usual = flat(&preset.to_json());
    let differs = |(key, value): (&String, &Value)| {
        let before = usual.get(key).unwrap_or(&Value::Null);
        (before != value).then(|| json!({ "key": key, "value": value, "preset": before }))
    };
    settings.iter().filter_map(differs).collect()
}

/// What a key of metrics.jsonl is: of which metric, in which group, in which order, with its one line. An unknown one is shown by its name.
fn meaning(metrics: &[Metric], key: &str) -> Value {
    let Some((metric, of, group)) = Metric::of_key(metrics, key) else {
        return json!({ "metric": key, "of": "training", "group": "More", "order": usize::MAX >> 12, "unit": "", "better": "neither", "about": "" });
    };
    let of = match of {
        Of::Training => "training",
        Of::Validation => "validation",
        Of::Epoch => "mean of the epoch",
    };
    let order = 1000 * group as usize + metrics.iter().position(|m| m.name == metric.name).unwrap_or(0);
    let mut value = metric.to_json();
    value["metric"] = metric.name.into();
    value["of"] = of.into();
    value["group"] = group.name().into();
    value["order"] = order.into();
    value
}

/// Larger ones are not shown.
const LARGEST: u64 = 8 << 20;

/// Pictures that lie in a run's folder itself; links may lead anywhere and are none.
fn pictures(run: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    let is_picture =
        |m: &std::fs::Metadata, name: &str| m.is_file() && m.len() <= LARGEST && kind(name).is_some() && !name.starts_with('.');
    let mut names: Vec<String> = entries
        .filter_map(|e| Some((e.path().symlink_metadata().ok()?, e.file_name().into_string().ok()?)))
        .filter_map(|(m, name)| is_picture(&m, &name).then_some(name))
        .collect();
    names.sort();
    names
}

fn kind(name: &str) -> Option<&'static str> {
    match Path::new(name).extension()?.to_str()? {
        "svg" => Some("image/svg+xml"),
        "png" => Some("image/png"),
        _ => None,
    }
}

/// A picture and its type; only a name that `details` lists is one.
pub fn picture(run: &Path, name: &str) -> io::Result<(&'static str, Vec<u8>)> {
    match pictures(run).iter().find(|known| *known == name).and_then(|name| kind(name)) {
        Some(kind) => Ok((kind, input::read(&run.join(name))?)),
        None => Err(io::ErrorKind::NotFound.into()),
    }
}

/// So many points of a key are in a report; of more, every n-th.
const POINTS: usize = 10_000;

/// The numbers of metrics.jsonl by key: pairs of step and value. Those that are not finite are left out, as the file has them as null.
pub fn series(run: &Path) -> Result<Map<String, Value>, metrics::MetricsError> {
    let path = run.join("metrics.jsonl");
    let records = if path.exists() { metrics::read(&path)?.all } else { vec![] };
    let mut all: Map<String, Value> = Map::new();
    for record in &records {
        for (key, value) in record.iter().filter(|(key, value)| *key != "step" && value.is_number()) {
            if let Some(points) = all.entry(key.clone()).or_insert_with(|| json!([])).as_array_mut() {
                points.push(json!([record["step"], value]));
            }
        }
    }
    for points in all.values_mut().filter_map(Value::as_array_mut) {
        let every = points.len().div_ceil(POINTS);
        if every > 1 {
            let last = points.len() - 1;
            *points = points.drain(..).enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|p| p.1).collect();
        }
    }
    Ok(all)
}
