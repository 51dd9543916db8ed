//! What a page shows of a run beside its curves. Each file is read by itself: what is damaged, or more than a page has room for, is said in a note of this
//! run, and hides nothing else.

use super::{Curve, Figures, Found, cut, declared, json_of, problem, settings_of};
use crate::Recipes;
use crate::config::Config;
use crate::inside::Inside;
use crate::recipe::{self, LOSS_CURVE, Metric, Of};
use crate::report::human_bytes;
use crate::run::SAMPLES;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

const RECEIPTS: &str = "receipts.json";
/// Settings of a run that are shown, and letters of one.
const SETTINGS: usize = 1000;
const LETTERS: usize = 2000;

/// Settings, what of them is not the preset's, receipts, samples, pictures, what the keys of metrics.jsonl mean, and notes on what is not shown.
pub fn details(found: &Found, figures: &Figures, recipes: Recipes) -> Value {
    let Ok(run) = found.folder() else { return json!({ "settings": {}, "samples": [], "pictures": [], "metrics": {}, "notes": [] }) };
    let mut notes = vec![];
    // Why config.toml cannot be read stands in the table of runs.
    let table = settings_of(&run).ok();
    let mut settings = table.as_ref().map(|t| flat(&json!(t))).unwrap_or_default();
    let named = |key: &str| settings.get(key).and_then(|v| v.as_str()).unwrap_or_default();
    let preset = recipe::find_in(recipes, named("recipe")).ok().and_then(|r| recipe::preset(r, Some(named("preset"))).ok());
    let metrics = declared(recipes, named("recipe"));
    if settings.len() > SETTINGS {
        notes.push(format!("{} more settings are not shown", settings.len() - SETTINGS));
        settings = settings.into_iter().take(SETTINGS).collect();
    }
    notes.extend(figures.not_shown(metrics));
    let (receipts, more) = receipts(&run).unwrap_or_else(|e| (Value::Null, Some(e)));
    notes.extend(more);
    let samples = samples(&run).unwrap_or_else(|e| {
        notes.push(problem(SAMPLES, &e));
        vec![]
    });
    let Pictures { shown: pictures, more, strange } = pictures(&run);
    notes.extend(
        strange.into_iter().map(|name| format!("{} is not shown: it is no drawing of the kind that kiln writes", cut(&name, LETTERS))),
    );
    if more > 0 {
        notes
            .push(format!("{more} more pictures are not shown: a page has the first {PICTURES}, of {} at most each", human_bytes(LARGEST)));
    }
    json!({
        "changed": preset.map(|preset| changed(&settings, &preset)),
        "settings": settings.into_iter().map(|(key, value)| (cut(&key, LETTERS), short(value))).collect::<Map<_, _>>(),
        "receipts": receipts,
        "samples": samples,
        "pictures": pictures,
        "metrics": figures.shown(metrics).into_iter().map(|key| (key.to_string(), meaning(metrics, key))).collect::<Map<_, _>>(),
        "notes": notes,
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

/// A value that is long is not shown to its end.
fn short(value: Value) -> Value {
    let text = value.as_str().map_or_else(|| value.to_string(), String::from);
    if text.len() > LETTERS { cut(&text, LETTERS).into() } else { value }
}

/// Keys whose value is not the preset's.
fn changed(settings: &Map<String, Value>, preset: &Config) -> Vec<Value> {
    let usual = flat(&preset.to_json());
    let differs = |(key, value): (&String, &Value)| {
        let before = usual.get(key).unwrap_or(&Value::Null);
        (before != value).then(|| json!({ "key": cut(key, LETTERS), "value": short(value.clone()), "preset": before }))
    };
    settings.iter().filter_map(differs).collect()
}

/// What receipts.json may be: what every pass did in every program, and beside them by how many ranks it was. A page relies on it.
#[derive(Deserialize)]
#[serde(untagged)]
#[allow(dead_code)]
enum Receipts {
    Passes(Vec<Receipt>),
    Ranks { data: u64, tensor: u64, over: Option<String> },
}

#[derive(Deserialize)]
#[allow(dead_code)]
struct Receipt {
    pass: String,
    mode: String,
    sites: u64,
    applied: u64,
    declined: Vec<Value>,
    notes: Vec<String>,
}

/// Of a list in the receipts (programs, passes of one, sites of one) so many are sent, of a text so many letters, and so many bytes of all.
const MOST: usize = 200;
const LINE: usize = 500;
const SENT: usize = 1 << 20;

/// Null where there are none; else what has room, and what is said of the rest; or why they cannot be shown.
fn receipts(run: &Inside) -> Result<(Value, Option<String>), String> {
    let Some(text) = super::there(run.read(RECEIPTS, LARGEST)).map_err(|e| problem(RECEIPTS, &e))? else { return Ok((Value::Null, None)) };
    let mut all = json_of(RECEIPTS, &text)?;
    if BTreeMap::<String, Receipts>::deserialize(&all).is_err() {
        return Err(format!("{RECEIPTS} is not what kiln writes: the receipts of this run are not shown"));
    }
    let is_cut = engine::mutant!("receipts-are-sent-whole", shorten(&mut all), false);
    if engine::mutant!("receipts-of-any-length", all.to_string().len() > SENT, false) {
        return Err(format!("{RECEIPTS} has more than a page has room for: the receipts of this run are not shown"));
    }
    Ok((all, is_cut.then(|| format!("{RECEIPTS} is long: of each list in it the first {MOST} are shown, and {LINE} letters of a text"))))
}

/// Cuts lists and texts that are longer than a page shows; whether there were any.
fn shorten(value: &mut Value) -> bool {
    match value {
        Value::String(text) => {
            let short = cut(text, LINE);
            let is_cut = short != *text;
            *text = short;
            is_cut
        }
        Value::Array(list) => {
            let is_cut = list.len() > MOST;
            list.truncate(MOST);
            list.iter_mut().fold(is_cut, |is_cut, v| shorten(v) | is_cut)
        }
        Value::Object(map) => {
            let mut is_cut = map.len() > MOST || map.keys().any(|key| key.len() > LINE);
            let some = std::mem::take(map).into_iter().filter(|(key, _)| key.len() <= LINE).take(MOST);
            *map = some
                .map(|(key, mut v)| {
                    is_cut |= shorten(&mut v);
                    (key, v)
                })
                .collect();
            is_cut
        }
        _ => false,
    }
}

/// The last samples are shown, from so much of the file's end at most.
const LAST: usize = 3;
const TAIL: u64 = 1 << 20;

#[derive(Deserialize)]
struct Sample {
    step: u64,
    text: String,
}

fn samples(run: &Inside) -> io::Result<Vec<Value>> {
    let Some(mut file) = super::there(run.file(SAMPLES))? else { return Ok(vec![]) };
    let from = file.metadata()?.len().saturating_sub(TAIL);
    file.seek(SeekFrom::Start(from))?;
    let mut tail = vec![];
    file.take(TAIL).read_to_end(&mut tail)?;
    let text = String::from_utf8_lossy(&tail);
    // A line whose beginning is not in the tail is no JSON.
    let all = text.lines().rev().filter_map(|line| serde_json::from_str::<Sample>(line).ok());
    let mut samples: Vec<Value> = all.take(LAST).map(|s| json!({ "step": s.step, "text": cut(&s.text, 10 * LETTERS) })).collect();
    samples.reverse();
    match samples.is_empty() && !tail.is_empty() {
        true => Err(io::Error::new(io::ErrorKind::InvalidData, "no sample can be read")),
        false => Ok(samples),
    }
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

/// Larger files are not shown.
const LARGEST: u64 = 8 << 20;
/// Pictures of a run that a page shows.
const PICTURES: usize = 24;

/// Pictures that lie in a run's folder itself; links are none.
struct Pictures {
    shown: Vec<String>,
    /// How many more there are.
    more: usize,
    /// Drawings that are not served.
    strange: Vec<String>,
}

/// The curve of its loss is not among them: the page draws it.
fn pictures(run: &Inside) -> Pictures {
    let names = run.names().unwrap_or_default().into_iter().filter_map(|name| name.into_string().ok());
    let is_picture = |name: &String| kind(name).is_some() && !name.starts_with('.') && name != LOSS_CURVE;
    let lengths = names.filter(is_picture).filter_map(|name| Some((run.length(name.as_ref())?, name)));
    let (small, large): (Vec<_>, Vec<_>) = lengths.partition(|(length, name)| *length <= largest(name));
    let more = large.len() + small.len().saturating_sub(PICTURES);
    let is_plain = |name: &String| !name.ends_with(".svg") || run.read(name, DRAWING).is_ok_and(|svg| is_plain_drawing(&svg));
    let (shown, strange) = small.into_iter().take(PICTURES).map(|(_, name)| name).partition(is_plain);
    Pictures { shown, more, strange }
}

/// A drawing's text is looked through before it is served.
const DRAWING: u64 = 2 << 20;

fn largest(name: &str) -> u64 {
    if name.ends_with(".svg") { DRAWING } else { LARGEST }
}

/// What kiln's own drawings are made of, and a few more. Nothing of it refers to other elements, to files, or to itself: with `use`, patterns, filters and
/// entities a few lines take a browser's memory, or hours.
const ELEMENTS: &[&str] =
    &["svg", "g", "path", "rect", "line", "polyline", "polygon", "circle", "ellipse", "text", "tspan", "title", "desc"];

/// Whether a drawing has no other elements, entities or declarations.
fn is_plain_drawing(svg: &[u8]) -> bool {
    // Without control characters no other encoding hides a tag.
    let Some(text) = std::str::from_utf8(svg).ok().filter(|t| !t.contains(|c: char| c.is_control() && !"\t\n\r".contains(c))) else {
        return false;
    };
    let text = text.trim_start();
    let body = text.strip_prefix("<?xml ").map_or(text, |rest| rest.split_once("?>").map_or("<", |rest| rest.1));
    let is_known = |tag: &str| {
        let name = tag.strip_prefix('/').unwrap_or(tag);
        ELEMENTS.contains(&name.split(|c: char| !(c.is_alphanumeric() || "-_.:".contains(c))).next().unwrap_or_default())
    };
    engine::mutant!("any-drawing-is-served", body.split('<').skip(1).all(is_known), true)
}

fn kind(name: &str) -> Option<&'static str> {
    match Path::new(name).extension()?.to_str()? {
        "svg" => Some("image/svg+xml"),
        "png" => Some("image/png"),
        _ => None,
    }
}

/// A picture and its type; only a name that `details` lists is one.
pub fn picture(run: &Inside, name: &str) -> io::Result<(&'static str, Vec<u8>)> {
    match pictures(run).shown.iter().find(|known| *known == name).and_then(|name| kind(name)) {
        Some(kind) => match run.read(name, largest(name))? {
            // It may be another file by now.
            bytes if name.ends_with(".svg") && !is_plain_drawing(&bytes) => Err(io::ErrorKind::NotFound.into()),
            bytes => Ok((kind, bytes)),
        },
        None => Err(io::ErrorKind::NotFound.into()),
    }
}

/// So many points of a key are in a report, of all keys of a run together, and of all runs; of more, every n-th.
const POINTS: usize = 10_000;
const OF_A_RUN: usize = 640_000;
const ALL_POINTS: usize = 4_000_000;

/// The numbers of metrics.jsonl by key: pairs of step and value. Those that are not finite are left out, as the file has them as null. `runs`: how many share
/// the page.
pub fn series(run: &Inside, figures: &mut Figures, metrics: &[Metric], runs: usize) -> io::Result<Map<String, Value>> {
    let Some(mut file) = super::there(figures.read_on(run))? else { return Ok(Map::new()) };
    let shown = figures.shown(metrics);
    let most = ((ALL_POINTS / runs.max(1)).min(OF_A_RUN) / shown.len().max(1)).clamp(1, POINTS);
    let (mut curves, mut from) = (BTreeMap::<String, Curve>::new(), 0);
    loop {
        let (points, next) = figures.points(&mut file, from, &shown)?;
        for (key, points) in points {
            let curve = curves.entry(key).or_default();
            points.into_iter().for_each(|(step, value)| curve.put(step, value, most));
        }
        if next == from {
            break;
        }
        from = next;
    }
    let pairs = |curve: Curve| curve.points(most).into_iter().map(|(step, value)| json!([step, value])).collect();
    Ok(curves.into_iter().map(|(key, curve)| (key, pairs(curve))).collect())
}
