//! Small things of every kind that kiln reads: runs, a data set, pictures, puzzles, a model, an adapter, a golden file. They name each
//! other by their paths, so that they lie in one place and are put back there after each attack.

use super::Place;
use super::jobs::{HYDRA, copy, create, documents, pictures, remove};
use std::fs;
use std::path::PathBuf;

pub struct Material {
    /// Where it is attacked, and where it stays whole.
    pub folder: PathBuf,
    whole: PathBuf,
}

/// Pairs of `puzzle,solution`, of both sides: what is learned and what validates.
const GRIDS: [&str; 4] = ["1234341221434321", "2143432112343412", "1324241331424231", "4321214334121234"];

const HRM: &str = "--set dim=16 --set heads=2 --set layers=1 --set experts=3 --set hidden=8 --set batch=5 --set max_segments=3 --set train_puzzles=20 --set test_puzzles=7 --set warmup=0 --threads 1";
const VISION: &str = "--set image=16 --set patch=4 --set classes=2 --set dim=16 --set heads=2 --set multiplier=4 --set loops=2 --set batch=2 --set warmup=0 --threads 1";
const DECODER: &str = "--set pretrain=0 --set dim=24 --set layers=2 --set head_dim=8 --set hidden=40 --set seq=16 --set batch=2 --set eval_batches=1 --set rank=2 --set dropout=0.1 --set objective.weight=0 --set new_tokens=4 --threads 1";

/// Commands on the material, whose folder is {}; and what of it each reads.
pub const COMMANDS: &[(&str, &[&str])] = &[
    ("eval {}/hydra --threads 1", &["hydra/checkpoints", "data"]),
    ("generate {}/hydra --prompt red --max-tokens 5 --threads 1", &["hydra/checkpoints", "data/tokenizer.json", "data/dataset.json"]),
    ("train --out {}/hydra --resume --steps 6 --threads 1", &["hydra", "data"]),
    ("train hydra HYDRA --set vocab=11 --data {}/data --steps 2 --out {}/new", &["data"]),
    ("train hydra HYDRA --set vocab=11 --data {}/data --init-from {}/hydra --steps 1 --out {}/new", &["hydra/checkpoints"]),
    (
        "train hydra HYDRA --set vocab=11 --data {}/data --init-from {}/hydra/checkpoints/step-00000004/model.safetensors --steps 1 --out {}/new",
        &["hydra/checkpoints/step-00000004/model.safetensors"],
    ),
    ("train --config {}/hydra/config.toml --steps 1 --threads 1 --out {}/new", &["hydra/config.toml"]),
    ("plan --config {}/hydra/config.toml --threads 1", &["hydra/config.toml"]),
    ("data inspect {}/data", &["data"]),
    ("data inspect {}/data/train-00000.tokens --json", &["data/train-00000.tokens"]),
    ("data prepare {}/documents.jsonl --tokenizer {}/words.json --val-share 0.2 --out {}/new", &["documents.jsonl", "words.json"]),
    ("data inspect {}/photos", &["photos"]),
    ("data preview --data {}/photos --size 16 --out {}/sheet.png", &["photos"]),
    ("train vision_bdh VISION --data {}/photos --steps 1 --out {}/new", &["photos"]),
    ("train --out {}/vision --resume --steps 6 --threads 1", &["vision", "photos"]),
    ("eval {}/vision --threads 1", &["vision/checkpoints", "photos"]),
    ("predict {}/vision {}/photos/val/a/1.png --threads 1", &["vision/checkpoints", "photos/val/a"]),
    ("train --out {}/hrm --resume --steps 6 --threads 1", &["hrm"]),
    ("solve {}/hrm --count 2 --threads 1", &["hrm/checkpoints"]),
    ("solve {}/hrm {}/puzzle.txt --threads 1", &["hrm/checkpoints", "puzzle.txt"]),
    ("eval {}/hrm --data {}/puzzles.csv --threads 1", &["puzzles.csv"]),
    ("train hrm HRM --data {}/puzzles.csv --steps 1 --out {}/new", &["puzzles.csv"]),
    ("check model {}/model --prompt red", &["model"]),
    ("generate {}/model --prompt red --raw --max-tokens 3 --threads 1", &["model"]),
    ("generate {}/model --prompt red --raw --max-tokens 3 --adapter {}/adapter --threads 1", &["adapter"]),
    ("generate {}/adapted --prompt red --max-tokens 3 --threads 1", &["adapted/checkpoints", "model"]),
    ("train --out {}/adapted --resume --steps 6 --threads 1", &["adapted", "model", "chat.jsonl"]),
    ("train polychromic DECODER ON --init-from {}/adapter --steps 1 --out {}/new", &["adapter"]),
    ("train polychromic DECODER ON --steps 1 --out {}/new", &["model", "chat.jsonl"]),
    ("eval {}/adapted --prompts 2 --replies 2 --threads 1", &["adapted/checkpoints", "model", "chat.jsonl"]),
    ("export {}/adapted --out {}/new", &["adapted/checkpoints", "model"]),
    ("export {}/adapted --merge --out {}/new", &["adapted/checkpoints", "model"]),
    ("check golden {}/golden.safetensors --threads 1", &["golden.safetensors"]),
];

impl Material {
    pub fn new(place: &Place) -> Result<Material, String> {
        let material = Material { folder: place.path("material"), whole: place.path("material-whole") };
        if material.whole.exists() {
            material.restore()?;
            return Ok(material);
        }
        let at = &material.folder;
        create(at)?;
        let write = |name: &str, text: &str| fs::write(at.join(name), text).map_err(|e| format!("{name}: {e}"));
        let (docs, words) = documents(place)?;
        for (from, name) in [(docs, "documents.jsonl"), (words.clone(), "words.json")] {
            fs::copy(&from, at.join(name)).map_err(|e| format!("{name}: {e}"))?;
        }
        copy(&pictures(place)?, &at.join("photos"))?;
        let golden = place.root.join("train/tests/golden/hrm-one.safetensors");
        fs::copy(&golden, at.join("golden.safetensors")).map_err(|e| format!("{}: {e}", golden.display()))?;
        write("puzzle.txt", "12 34\n34 12\n21 ..\n43 21\n")?;
        write("puzzles.csv", &puzzles())?;
        let reply = |i: usize| {
            format!(
                "{{\"prompt\":\"red {} is\",\"reply\":\"one and two\"}}\n",
                ["green", "blue", "not", "a", "three"][i % 5].repeat(1 + i / 5 % 2)
            )
        };
        write("chat.jsonl", &(0..20).map(reply).collect::<String>())?;
        let long = "--set save_every=2 --set train.keep=0 --set horizon=6 --set eval_every=4 --steps 4";
        for command in [
            "data prepare {}/documents.jsonl --tokenizer {}/words.json --val-share 0.2 --shard-tokens 300 --out {}/data".into(),
            format!("train hydra HYDRA --set vocab=11 --data {{}}/data {long} --out {{}}/hydra"),
            format!("train vision_bdh VISION --data {{}}/photos {long} --out {{}}/vision"),
            format!("train hrm HRM {long} --out {{}}/hrm"),
            "train polychromic DECODER --steps 1 --out {}/drawn".into(),
            "export {}/drawn --merge --out {}/model".into(),
        ] {
            place.must(&material.filled(&command))?;
        }
        fs::copy(words, at.join("model/tokenizer.json")).map_err(|e| format!("tokenizer.json: {e}"))?;
        for command in [format!("train polychromic DECODER ON {long} --out {{}}/adapted"), "export {}/adapted --out {}/adapter".into()] {
            place.must(&material.filled(&command))?;
        }
        remove(&at.join("drawn"))?;
        copy(at, &material.whole)?;
        Ok(material)
    }

    /// A command as it is run.
    pub fn filled(&self, command: &str) -> String {
        let on = "--set model.base={}/model --data {}/chat.jsonl --set data.template={prompt}{reply} --set data.val_share=0.3";
        let words = [("HYDRA", HYDRA), ("VISION", VISION), ("HRM", HRM), ("DECODER", DECODER), ("ON", on)];
        let one = |word: &str| words.iter().find(|(name, _)| *name == word).map_or(word, |(_, meaning)| meaning).to_string();
        command.split(' ').map(one).collect::<Vec<_>>().join(" ").replace("{}", &self.folder.display().to_string())
    }

    pub fn restore(&self) -> Result<(), String> {
        remove(&self.folder)?;
        copy(&self.whole, &self.folder)
    }
}

/// Each grid with another of its cells open.
fn puzzles() -> String {
    let line = |i: usize| {
        let grid = GRIDS[i % GRIDS.len()];
        let open: String = grid.chars().enumerate().map(|(at, c)| if at == i / 4 || at == 15 - i / 4 { '0' } else { c }).collect();
        format!("{open},{grid}\n")
    };
    (0..24).map(line).collect()
}
