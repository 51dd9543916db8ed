//! Files that are made to hurt who reads them: chat templates, archives, lists of weights, checkpoints of ranks. Whatever they hold, a command on them ends
//! soon, in little memory, with a result or a message.

use super::jobs::{copy, names};
use super::material::Material;
use super::seal::reseal;
use super::{Finding, Kind, Part, Place};
use fastrand::Rng;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// KiB of address space.
const MEMORY: u64 = 6 << 20;

struct Crafted<'a> {
    place: &'a Place,
    material: Material,
    /// Puts a file into the material; what it is.
    craft: fn(&Path, &mut Rng) -> io::Result<String>,
    commands: &'static [&'static str],
}

fn part<'a>(
    place: &'a Place,
    craft: fn(&Path, &mut Rng) -> io::Result<String>,
    commands: &'static [&'static str],
) -> Result<Option<Box<dyn Part + 'a>>, String> {
    Ok(Some(Box::new(Crafted { place, material: Material::new(place)?, craft, commands })))
}

impl Part for Crafted<'_> {
    fn attack(&mut self, _: u64, random: &mut Rng, folder: &Path) -> Result<String, Finding> {
        let wrong = |e: String| Finding::new(Kind::Wrong, e);
        self.material.restore().map_err(wrong)?;
        let what = (self.craft)(&self.material.folder, random).map_err(|e| wrong(e.to_string()))?;
        let command = random.choice(self.commands).expect("not empty");
        let ran = self.place.call(self.material.filled(command).split(' ')).limited(MEMORY).run();
        let judged = ran.good_or_said();
        if judged.is_err() {
            let _ = copy(&self.material.folder, folder);
        }
        let shown: String = what.chars().take(500).collect();
        let good = judged.map_err(|f| Finding::new(f.kind, format!("{shown}: {}", f.text)))?;
        Ok(if good { "read" } else { "refused" }.into())
    }
}

fn pick<'t>(from: &[&'t str], random: &mut Rng) -> &'t str {
    from[random.usize(..from.len())]
}

// ---- chat templates

pub fn templates(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    part(
        place,
        |folder, random| {
            let text = template(random);
            if random.bool() {
                fs::write(folder.join("model/chat_template.jinja"), &text)?;
            } else {
                let config = serde_json::json!({ "chat_template": text, "eos_token": "red" });
                fs::write(folder.join("model/tokenizer_config.json"), config.to_string())?;
            }
            fs::write(folder.join("talk.jsonl"), TALK.repeat(6))?;
            Ok(text)
        },
        &[
            "generate {}/model --prompt red --max-tokens 2 --threads 1",
            "check model {}/model --prompt red",
            "train decoder --base {}/model --data {}/talk.jsonl --steps 1 --out {}/new --threads 1",
        ],
    )
}

const TALK: &str = "{\"messages\":[{\"role\":\"user\",\"content\":\"red green\"},{\"role\":\"assistant\",\"content\":\"blue\"}]}\n";
const HUGE: &[&str] = &["99999", "1000000", "10000000000", "999999999999999999", "-1", "1e300"];

fn template(random: &mut Rng) -> String {
    let huge = pick(HUGE, random);
    let many = random.usize(2..30_000);
    match random.u32(0..14) {
        0 => format!(
            "{{% for a in range({huge}) %}}{{% for b in range({huge}) %}}{}{{% endfor %}}{{% endfor %}}",
            pick(&["", "x", "{{ a }}"], random)
        ),
        1 => format!(
            "{{% set n = namespace(l={}) %}}{{% for i in range({}) %}}{{% set n.l = {} %}}{{% endfor %}}{{{{ n.l{} }}}}",
            pick(&["[]", "'xx'", "[1]", "{}"], random),
            pick(HUGE, random),
            pick(&["[n.l]", "n.l ~ n.l", "n.l + n.l", "{'a': n.l}", "(n.l, n.l)"], random),
            pick(&["", "|tojson", "|length", "|string", "|list", "|join", "|pprint"], random)
        ),
        2 => format!("{{{{ {}1{} }}}}", "-".repeat(many), ""),
        3 => format!("{{{{ {}1{} }}}}", "(".repeat(many), ")".repeat(many)),
        4 => format!("{{{{ {}1{} }}}}", "[".repeat(many), "]".repeat(many)),
        5 => format!("{}x{}", "{% if true %}".repeat(many), "{% endif %}".repeat(many)),
        6 => format!(
            "{{{{ 1{} }}}}",
            pick(&["|string", "|abs", " + 1", " ~ 1", ".a", "[0]", " if 1", " is defined", " and 1", " == 1"], random).repeat(many)
        ),
        7 => format!(
            "{{% macro m(a) %}}{{{{ {} }}}}{{% endmacro %}}{{{{ m(1) }}}}",
            pick(&["m(a)", "m([a])", "m(a) ~ m(a)", "caller()"], random)
        ),
        8 => format!("{{{{ {}x{} }}}}", "not ".repeat(many), ""),
        9 => format!("{{{{ raise_exception({}) }}}}", expression(random, 0)),
        10 => (0..random.usize(1..200)).map(|_| random.char('\u{1}'..)).collect(),
        11 => format!("{{% for m in messages %}}{{{{ {} }}}}{{% endfor %}}", expression(random, 0)),
        _ => format!("{{{{ {} }}}}", expression(random, 0)),
    }
}

fn expression(random: &mut Rng, depth: u32) -> String {
    let huge = pick(HUGE, random);
    if depth > 3 {
        return pick(&["messages", "'x'", "messages[0].content", "[1, 2]", "undefined", "3"], random).into();
    }
    let mut e = || expression(random, depth + 1);
    let (a, b) = (e(), e());
    match random.u32(0..16) {
        0 => format!("({a} ~ {b})"),
        1 => format!("({a} * {huge})"),
        2 => format!("('x' * {huge})"),
        3 => format!("([{a}] * {huge})"),
        4 => format!("({a})|tojson(indent={huge})"),
        5 => format!("({a})|{}({huge})", pick(&["indent", "batch", "slice", "center", "round", "truncate", "wordwrap"], random)),
        6 => format!(
            "({a})|{}",
            pick(
                &["list", "sort", "unique", "reverse", "join", "upper", "pprint", "items", "string", "urlencode", "sum", "tojson"],
                random
            )
        ),
        7 => format!("'%{huge}d'|format({a})"),
        8 => format!("({a}).{}({huge})", pick(&["ljust", "rjust", "center", "zfill", "expandtabs", "split", "strip"], random)),
        9 => format!("({a}).replace('', {b})"),
        10 => format!("range({huge})"),
        11 => format!("({a}).join(range({huge}))"),
        12 => format!("dict(a={a}, b={b})"),
        13 => format!("strftime_now('%{huge}Y')"),
        14 => format!("({a} if {b} else {a})"),
        _ => a,
    }
}

// ---- archives

pub fn archives(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    let gzip = Command::new("gzip").arg("--version").output();
    if gzip.is_err() {
        println!("NOT CHECKED: there is no gzip to pack archives with");
        return Ok(None);
    }
    part(
        place,
        |folder, random| {
            let mebibytes = random.u32(1..3000);
            let (begin, fill, end) = ROWS[random.usize(..ROWS.len())];
            let mut file = File::create(folder.join("packed.jsonl.gz"))?;
            file.write_all(&gzipped(begin.as_bytes())?)?;
            let member = gzipped(&fill.as_bytes().iter().copied().cycle().take(1 << 20).collect::<Vec<_>>())?;
            (0..mebibytes).try_for_each(|_| file.write_all(&member))?;
            file.write_all(&gzipped(end.as_bytes())?)?;
            if random.u32(0..4) == 0 {
                let length = file.metadata()?.len();
                file.set_len(random.u64(0..length))?;
            }
            fs::copy(folder.join("packed.jsonl.gz"), folder.join("packed.csv.gz"))?;
            // Holes: gigabytes that take no place.
            File::create(folder.join("holes.jsonl"))?.set_len(u64::from(mebibytes) << 20)?;
            Ok(format!("{mebibytes} MiB of {fill:?} in gzip"))
        },
        &[
            "data inspect {}/packed.jsonl.gz",
            "data inspect {}/holes.jsonl",
            "data prepare {}/packed.jsonl.gz --tokenizer {}/words.json --val-share 0.2 --out {}/new",
            "data prepare {}/holes.jsonl --tokenizer {}/words.json --val-share 0.2 --out {}/new",
            "train decoder --base {}/model --data {}/packed.jsonl.gz --steps 1 --out {}/new --threads 1",
            "train decoder --base {}/model --data {}/holes.jsonl --steps 1 --out {}/new --threads 1",
            "train hrm HRM --data {}/packed.csv.gz --steps 1 --out {}/new",
        ],
    )
}

/// Rows without an end: what they begin with, what fills them, what ends them.
const ROWS: &[(&str, &str, &str)] = &[
    ("{\"text\":\"", "a", "\"}\n"),
    ("{\"text\":", "[", "\n"),
    ("", "\0", ""),
    ("{\"messages\":[", "{\"role\":\"user\",\"content\":\"red\"},", "{}]}\n"),
    ("{\"prompt\":\"red\",\"reply\":\"", "\\u0061", "\"}\n"),
    ("puzzle,solution\n", "1", "\n"),
];

fn gzipped(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut child = Command::new("gzip").arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().expect("a pipe");
    // What a mebibyte of one pattern packs to fits into the pipe that is read afterwards.
    input.write_all(bytes)?;
    drop(input);
    Ok(child.wait_with_output()?.stdout)
}

// ---- lists of weights

pub fn indexes(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    part(
        place,
        |folder, random| {
            let model = folder.join("model");
            let mut what = index(random);
            if random.bool() {
                fs::rename(model.join("model.safetensors"), model.join("part-1.safetensors"))?;
                what += "; weights are part-1.safetensors";
            }
            Ok(what).and_then(|what: String| {
                fs::write(model.join("model.safetensors.index.json"), what.split("; weights").next().unwrap_or_default()).map(|()| what)
            })
        },
        &[
            "check model {}/model",
            "generate {}/model --prompt red --raw --max-tokens 2 --threads 1",
            "plan decoder --set model.base={}/model",
        ],
    )
}

fn index(random: &mut Rng) -> String {
    let file = |random: &mut Rng| {
        pick(&["part-1.safetensors", "model.safetensors", "../secret", "/dev/zero", "/dev/stdin", "", ".", "a/b", "config.json"], random)
            .to_string()
    };
    let many = random.usize(1..150_000);
    match random.u32(0..7) {
        0 => {
            let entries: Vec<String> = (0..many).map(|i| format!("\"t{i}\":\"part-{i}.safetensors\"")).collect();
            format!("{{\"weight_map\":{{{}}}}}", entries.join(","))
        }
        1 => {
            let name = file(random);
            let entries: Vec<String> = (0..many).map(|i| format!("\"t{i}\":{name:?}")).collect();
            format!("{{\"weight_map\":{{{}}}}}", entries.join(","))
        }
        2 => format!("{{\"weight_map\":{}1{}}}", "[".repeat(many), "]".repeat(many)),
        3 => format!("{{\"weight_map\":{{\"{}\":{:?}}}}}", "x".repeat(many), file(random)),
        4 => format!(
            "{{\"metadata\":{{\"total_size\":1e999}},\"weight_map\":{{\"embed\":{:?},\"embed\":{:?}}}}}",
            file(random),
            file(random)
        ),
        5 => pick(&["", "{}", "[]", "null", "{\"weight_map\":null}", "{\"weight_map\":{\"a\":1}}", "{\"weight_map\":[]}"], random).into(),
        _ => format!("{{\"weight_map\":{{\"model.embed_tokens.weight\":{:?}}}}}", file(random)),
    }
}

// ---- checkpoints of ranks

pub fn ranks(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    part(
        place,
        |folder, random| {
            let folder = folder.join("hydra/checkpoints/step-00000004");
            let of = random.usize(1..5);
            let mut what = String::new();
            for rank in 0..of {
                let (bytes, said) = rank_file(rank, of, random);
                let name = format!("rank-{rank:05}.safetensors");
                fs::write(folder.join(&name), bytes)?;
                let path = folder.join("checkpoint.json");
                let entry = format!("\"files\": {{\n    \"{name}\": {{\n      \"bytes\": 0,\n      \"xxh3\": \"0\"\n    }},");
                fs::write(&path, fs::read_to_string(&path)?.replacen("\"files\": {", &entry, 1))?;
                what += &said;
            }
            let listed = names(&folder).iter().filter(|n| n.starts_with("rank-")).count();
            if listed != of || !reseal(&folder.join("checkpoint.json")) {
                return Err(io::Error::other("the checkpoint could not be sealed"));
            }
            Ok(what)
        },
        &[
            "train --out {}/hydra --resume --steps 6 --threads 1",
            "eval {}/hydra --threads 1",
            "generate {}/hydra --prompt red --max-tokens 2 --threads 1",
            "train hydra HYDRA --set vocab=11 --data {}/data --init-from {}/hydra --steps 1 --out {}/new",
        ],
    )
}

/// A file of a rank with a part of one tensor, whose place in the whole is odd in one way or another.
fn rank_file(rank: usize, of: usize, random: &mut Rng) -> (Vec<u8>, String) {
    let number = |usual: usize, random: &mut Rng| match random.u32(0..3) {
        0 => [0, 1, 3, 1 << 20, 1 << 32, 1 << 40, u64::MAX, u64::MAX / 2 + 1][random.usize(0..8)],
        _ => usual as u64,
    };
    let rows = number(8, random);
    let shape = if random.bool() { vec![rows, 4] } else { vec![rows, number(4, random), number(2, random)] };
    let axis = match random.u32(0..4) {
        0 => "null".to_string(),
        1 => format!("[0, {}]", number(2, random)),
        _ => number(0, random).to_string(),
    };
    let place = format!("{{\"shape\":{shape:?},\"axis\":{axis},\"index\":{},\"of\":{}}}", number(rank, random), number(of, random));
    let places = vec![place; random.usize(0..4)].join(",");
    let tensor = pick(&["model.safetensors:embed", "state.safetensors:embed", "model.safetensors:none", "none"], random);
    let notes = serde_json::json!({ "parts": format!("{{\"{tensor}\":[{places}]}}") });
    let kind = pick(&["F32", "F32", "BF16", "I64", "U8"], random);
    let header = serde_json::json!({ "__metadata__": notes, tensor: { "dtype": kind, "shape": [8 / of.max(1), 4], "data_offsets": [0, 8 / of.max(1) * 4 * width(kind)] } }).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + 8 / of.max(1) * 4 * width(kind), 1);
    (bytes, format!("rank {rank} of {of}, {kind}: {places}; "))
}

fn width(kind: &str) -> usize {
    match kind {
        "I64" => 8,
        "F32" => 4,
        "BF16" => 2,
        _ => 1,
    }
}
