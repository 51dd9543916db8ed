//! Command lines that nobody would write: whatever they say, kiln answers, or says what is wrong with them. Flags are taken from `--help`,
//! settings and what they usually are from the presets.

use super::damage::odd_number;
use super::jobs::{copy, names};
use super::material::{COMMANDS, Material};
use super::process::End;
use super::{Finding, Kind, Part, Place};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// KiB of address space.
const MEMORY: u64 = 6 << 20;

/// What is no command of the material's: figures alone, or nothing at all.
const OTHERS: &[&str] = &[
    "plan hydra",
    "plan vision_bdh",
    "plan hrm --preset sudoku-moe",
    "plan lior",
    "plan polychromic --set pretrain=0",
    "plan hydra --preset 100m --for-sm 90",
    "bench hydra HYDRA --repeat 1 --warmup 0",
    "bench hrm HRM --repeat 1 --warmup 0",
    "train lior --steps 1 --out {}/new",
    "passes",
    "doctor",
    "check ops silu",
    "data preview --out {}/sheet.png",
    "data prepare --generated 20 --val-share 0.2 --out {}/new",
    "",
];

const TEXTS: &[&str] = &[
    "",
    " ",
    "x",
    "-",
    "--",
    "=",
    "a=b",
    ",",
    "off",
    "auto",
    "require",
    "cpu",
    "cuda:99",
    "\u{1f4a5}",
    "\n",
    "\t\t",
    "/nowhere/at/all",
    "/dev/null",
    "..",
    ".",
    "\\",
    "{}",
    "[",
    "\"",
    "'",
    "%s%n",
    "*",
    "1979-05-27",
    "0x10",
    "{a=1}",
    "[1, 2]",
    "[0.5, 0.25]",
    "[1.0]",
    "[nan]",
    "[\"q\"]",
    "red",
    "\\n",
];

struct Fuzz<'a> {
    place: &'a Place,
    material: Material,
    /// By a command's first words: its flags, and the value that each takes.
    flags: BTreeMap<String, Vec<(String, String)>>,
    /// Of a recipe: keys with their sections, and what they are in a preset.
    settings: BTreeMap<String, Vec<(String, String)>>,
    passes: Vec<String>,
}

pub fn make(place: &Place) -> Result<Option<Box<dyn Part + '_>>, String> {
    let material = Material::new(place)?;
    let mut flags = BTreeMap::new();
    for command in COMMANDS.iter().map(|c| c.0).chain(OTHERS.iter().copied()) {
        let words = words(command);
        let help = place.must(&format!("{words} --help"))?.out;
        flags.insert(words, help.lines().filter_map(flag).collect());
    }
    let receipts = fs::read_to_string(material.folder.join("hydra/receipts.json")).map_err(|e| format!("receipts.json: {e}"))?;
    let passes = receipts.lines().filter_map(|l| Some(l.trim().strip_prefix("\"pass\": \"")?.split('"').next()?.to_string())).collect();
    Ok(Some(Box::new(Fuzz { place, material, flags, settings: settings(place)?, passes })))
}

/// `data prepare`, `check model`, `train`: what there is help for.
fn words(command: &str) -> String {
    let nested = ["data ", "check "].iter().any(|n| command.starts_with(n));
    command.split(' ').take(if nested { 2 } else { 1 }).collect::<Vec<_>>().join(" ")
}

/// `      --set <KEY=VALUE>   Sets one key`
fn flag(line: &str) -> Option<(String, String)> {
    let mut words = line.split_whitespace();
    let name = words.next().filter(|w| w.starts_with("--"))?;
    let value = words.next().filter(|w| w.starts_with('<')).unwrap_or_default();
    Some((name.into(), value.trim_matches(['<', '>']).into()))
}

fn settings(place: &Place) -> Result<BTreeMap<String, Vec<(String, String)>>, String> {
    let configs = place.root.join("train/configs");
    let mut all: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for name in names(&configs) {
        let text = fs::read_to_string(configs.join(&name)).map_err(|e| format!("{name}: {e}"))?;
        let own = all.entry(name.split('-').next().unwrap_or_default().into()).or_default();
        let mut section = "";
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            match line.split_once(" = ") {
                None if line.starts_with('[') => section = line.trim_matches(['[', ']']),
                Some((key, value)) => own.push((format!("{section}.{key}"), value.into())),
                None => {}
            }
        }
    }
    Ok(all)
}

impl Part for Fuzz<'_> {
    fn attack(&mut self, _: u64, random: &mut Rng, folder: &Path) -> Result<String, Finding> {
        let wrong = |e: String| Finding::new(Kind::Wrong, e);
        let ran = self.place.call(self.line(random)).limited(MEMORY).run();
        // What was asked for may be large.
        if ran.end == End::Busy {
            println!("slow: {}", ran.shown);
            self.material.restore().map_err(wrong)?;
            return Ok("slow".into());
        }
        let judged = ran.good_or_said();
        if judged.is_err() {
            let _ = copy(&self.material.folder, folder);
        }
        self.material.restore().map_err(wrong)?;
        Ok(if judged? { "accepted" } else { "refused" }.into())
    }
}

impl Fuzz<'_> {
    /// A command that works, with something else in it.
    fn line(&self, random: &mut Rng) -> Vec<String> {
        let at = random.usize(..COMMANDS.len() + OTHERS.len());
        let command = COMMANDS.get(at).map_or_else(|| OTHERS[at - COMMANDS.len()], |c| c.0);
        let flags = &self.flags[&words(command)];
        let mut args: Vec<String> = self.material.filled(command).split(' ').filter(|a| !a.is_empty()).map(str::to_owned).collect();
        let sets = flags.iter().any(|f| f.0 == "--set");
        for _ in 0..random.u32(1..=3) {
            match random.u32(0..20) {
                0..10 if sets => args.extend(["--set".into(), self.setting(command, random)]),
                0..16 => args.extend(self.flag(command, flags, random)),
                16 if args.len() > 2 => drop(args.remove(random.usize(1..args.len()))),
                17 if args.len() > 2 => {
                    let at = random.usize(1..args.len());
                    // Of paths only the ends: what is written stays in its place.
                    args[at] = if args[at].starts_with('/') { args[at].clone() + &text(random).replace("..", "") } else { text(random) };
                }
                _ => args.insert(random.usize(0..=args.len()), text(random)),
            }
        }
        args
    }

    fn setting(&self, command: &str, random: &mut Rng) -> String {
        let recipe = command.split(' ').find(|w| self.settings.contains_key(*w)).unwrap_or("hydra");
        let own = random.u32(0..8) > 0;
        let keys =
            if own { &self.settings[recipe] } else { self.settings.values().nth(random.usize(..self.settings.len())).expect("some") };
        let (key, usual) = random.choice(keys).expect("not empty");
        // Where replies are written to.
        let value = if key.ends_with("eval_file") { "replies.jsonl".into() } else { like(usual, random) };
        match random.u32(0..10) {
            0 => format!("{}={value}", key.rsplit('.').next().unwrap_or(key)),
            1 => format!("{}={value}", text(random)),
            _ => format!("{key}={value}"),
        }
    }

    fn flag(&self, command: &str, flags: &[(String, String)], random: &mut Rng) -> Vec<String> {
        let Some((name, value)) = random.choice(flags) else { return vec!["--help".into()] };
        let writes =
            matches!(name.as_str(), "--out" | "--write" | "--picture" | "--write-replies") || name == "--json" && !value.is_empty();
        let given = match value.as_str() {
            _ if writes => ["new", "new/inner/most", "photos", "", &"x".repeat(300)][random.usize(0..5)].to_string(),
            "" => return vec![name.clone()],
            "KEY=VALUE" => self.setting(command, random),
            v if v.contains("off|auto") => self.pass(random),
            _ if random.bool() => number(random),
            _ => text(random),
        };
        if random.u32(0..6) == 0 { vec![format!("{name}={given}")] } else { vec![name.clone(), given] }
    }

    fn pass(&self, random: &mut Rng) -> String {
        let name = random.choice(&self.passes).cloned().unwrap_or_default();
        let more = [
            "",
            "",
            "",
            ",what=blocks",
            ",what=memory-bound",
            ",chunk=0",
            ",chunk=7",
            ",price=nan",
            ",spare=99999999999999",
            ",rows=all",
            ",x=1",
            ",",
            "=",
        ];
        format!("{name}={}{}", ["off", "auto", "require", "on"][random.usize(0..4)], random.choice(&more).expect("not empty"))
    }
}

fn number(random: &mut Rng) -> String {
    if random.bool() { random.u32(0..40).to_string() } else { odd_number(random).into() }
}

fn text(random: &mut Rng) -> String {
    match random.u32(0..12) {
        0 => "x".repeat(random.usize(1..10_000)),
        1 => (0..random.usize(1..20)).map(|_| random.char('\u{1}'..)).collect(),
        2 => number(random),
        _ => random.choice(TEXTS).expect("not empty").to_string(),
    }
}

/// Something of the same kind as what it usually is, or not.
fn like(usual: &str, random: &mut Rng) -> String {
    if random.u32(0..5) == 0 {
        return text(random);
    }
    if let Ok(n) = usual.parse::<i64>() {
        let near = [0, 1, 2, 3, n - 1, n + 1, 2 * n, n / 2, 3 * n + 1, 64, 1000, 1 << 16, 1 << 20, 1 << 31, -n, i64::MAX, i64::MIN];
        return random.choice(&near).expect("not empty").to_string();
    }
    if let Ok(x) = usual.parse::<f64>() {
        let near = [0.0, -x, 2.0 * x, 1.0, 0.5, 1.5, 1e-30 * x, 1e30 * x, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE];
        return format!("{:?}", random.choice(&near).expect("not empty"));
    }
    if let Some(inside) = usual.strip_prefix('[').and_then(|u| u.strip_suffix(']')) {
        let mut parts: Vec<String> = inside.split(", ").map(str::to_owned).collect();
        match random.u32(0..4) {
            0 => parts.reverse(),
            1 => drop(parts.pop()),
            2 => parts.push(number(random)),
            _ => parts = vec![parts[0].clone(); random.usize(1..200)],
        }
        return format!("[{}]", parts.join(","));
    }
    if matches!(usual, "true" | "false") { (!random.bool()).to_string() } else { text(random) }
}
