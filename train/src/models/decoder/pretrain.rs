//! A base of one's own: a small decoder, trained on generated questions as a language model, and kept in a cache for the runs to come.

use super::{Base, Decoder, Places};
use crate::config::TrainConfig;
use crate::data::replies::{Questions, Quiz, Template, TooLong};
use crate::data::{Source, Split};
use crate::files;
use crate::models::{ModelError, Shape, Weight, new_folder, write_json, write_weights};
use crate::optim::schedule::rate;
use crate::recipe::{Feeds, Model, Session, Supervised, Task, TrainError};
use crate::report::human_bytes;
use crate::report::human_time;
use crate::say;
use engine::{DType, Device, Recorder, Switches, Var};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

/// Runs of every seed and every setting of the passes share a base.
const SEED: u64 = 0;

fn settings(steps: u64) -> TrainConfig {
    TrainConfig {
        steps,
        horizon: steps,
        batch: 16,
        learning_rate: 3e-3,
        schedule: "cosine".into(),
        warmup: steps.min(20),
        eval_batches: 4,
        ..TrainConfig::default()
    }
}

/// A base that is yet to be trained.
pub struct Pretraining {
    pub shape: Shape,
    pub seq: usize,
    pub steps: u64,
}

/// Learns prompts and replies alike, every way to reply as often as every other.
struct Pretrained {
    shape: Shape,
    seq: usize,
    tokenizer: Arc<crate::data::Tokenizer>,
}

impl Pretrained {
    fn new(shape: Shape, seq: usize) -> Result<Pretrained, TrainError> {
        let model = Pretrained { shape, seq, tokenizer: Arc::new(Quiz::get().tokenizer()?) };
        model.questions(Split::Train)?.check()?;
        Ok(model)
    }

    fn questions(&self, split: Split) -> Result<Questions, TrainError> {
        Ok(Questions {
            tokenizer: self.tokenizer.clone(),
            template: Template::fitting(&self.tokenizer, None)?,
            seq: self.seq,
            vocab: self.shape.vocab,
            pack: true,
            too_long: TooLong::Cut,
            skew: 1.0,
            whole: true,
            ignore: vec![],
            seed: Questions::stream(SEED ^ 0x6261_7365, split),
            rows: if split == Split::Train { Questions::ENDLESS } else { 64 },
        })
    }
}

impl Model for Pretrained {
    fn seq(&self) -> usize {
        self.seq
    }

    fn has_places(&self) -> bool {
        true
    }

    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let f = Feeds::new(r, batch, self.seq);
        let d = Decoder { shape: &self.shape, lora: None, base: Base::Trained, r, rng: None };
        let hidden = d.hidden(f.ids, Some(Places::fed(r, batch, self.seq)));
        vec![("loss", d.loss(hidden, f.targets, f.weight))]
    }

    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(Arc::new(self.questions(if train { Split::Train } else { Split::Val })?))
    }

    fn vocab(&self) -> usize {
        self.shape.vocab
    }
}

impl Pretraining {
    /// Where the base is kept: its name changes with everything that it is made from.
    pub fn path(&self) -> PathBuf {
        let texts: Vec<String> = (0..64).map(|i| Quiz::get().draw(SEED, i)).map(|q| format!("{} {:?}", q.prompt, q.replies())).collect();
        let settings = serde_json::to_value(settings(self.steps)).expect("plain values");
        let made_from = format!("2 {:?} {} {settings} {texts:?} {}", self.shape, self.seq, Quiz::get().tokenizer_json());
        cached_base(xxh3_64(made_from.as_bytes()))
    }

    /// Where the base is, if it has been trained: whole, or an error that says how to have it made again.
    pub fn found(&self) -> Result<Option<PathBuf>, TrainError> {
        let path = self.path();
        if path.is_symlink() && !path.exists() {
            let path = path.display();
            return Err(TrainError::Other(format!(
                "{path} is a link to a folder that is not there: remove it, and the base is trained again (rm {path})"
            )));
        }
        if !path.exists() {
            return Ok(None);
        }
        is_whole(&path).map_err(TrainError::Other)?;
        Ok(Some(path))
    }

    /// Trains the base, unless it is in the cache. What is stopped leaves nothing there.
    pub fn make(&self, device: &Device, stop: &AtomicBool) -> Result<(), TrainError> {
        if let Some(path) = self.found()? {
            say!("base {} (trained here before)", path.display());
            return Ok(());
        }
        let path = self.path();
        let (started, train) = (Instant::now(), settings(self.steps));
        say!("no model.base: training one on generated questions first, {} steps (once: it is kept in {})", train.steps, path.display());
        let staged = new_folder(&path)?;
        let mut task = Supervised::new(Pretrained::new(self.shape.clone(), self.seq)?, train.clone(), SEED);
        let mut s = crate::run::load_with(&task, &Switches::default(), SEED, device).map_err(|e| match e {
            TrainError::Memory { needs, free, .. } => TrainError::Other(format!(
                "training a base first (model.base is empty, model.pretrain = {}) needs {needs} of memory, and {} are free: lower model.seq or the model's sizes, or name a model's folder with model.base",
                train.steps,
                human_bytes(free)
            )),
            e => e,
        })?;
        task.begin(0)?;
        for step in 0..train.steps {
            if stop.load(Ordering::Relaxed) {
                return Err(TrainError::Other(format!(
                    "stopped while the base was trained, after {step} of {} steps: nothing is kept",
                    train.steps
                )));
            }
            task.step(&mut s, step, rate(&train, step))?;
            if (step + 1).is_multiple_of((train.steps / 5).max(1)) {
                let report = task.report(&s)?.finish()?;
                let loss = report.values[0].1;
                if !loss.is_finite() {
                    return Err(TrainError::Other(format!("training a base first failed: its loss is {loss} at step {}", step + 1)));
                }
                say!("base: step {}/{}  loss {loss:.4}", step + 1, train.steps);
            }
        }
        let loss = task.evaluate(&mut s)?.values[0].1;
        if !loss.is_finite() {
            return Err(TrainError::Other(format!("training a base first failed: its validation loss is {loss}")));
        }
        write(staged.dir(), &task.model, &s)?;
        match staged.finish() {
            // Another process was quicker.
            Err(_) if path.exists() => {}
            other => other.map_err(ModelError::io("rename a folder to", &path))?,
        }
        say!("base trained in {}, validation loss {loss:.4}", human_time(started.elapsed()));
        Ok(())
    }
}

/// The checksums of a base's files, by name, in a file beside them.
const SUMS: &str = "checksums.json";

/// A base in the cache.
pub fn cached_base(hash: u64) -> PathBuf {
    crate::gpu::cache().join("bases").join(format!("{hash:016x}"))
}

/// Whether a folder lies in the cache of bases, by whatever name.
pub fn is_cached(path: &Path) -> bool {
    let bases = crate::gpu::known_cache().and_then(|cache| cache.join("bases").canonicalize().ok());
    bases.zip(path.canonicalize().ok()).is_some_and(|(bases, path)| path.parent() == Some(&bases))
}

/// Refuses a damaged base of the cache, whoever names it: an adapter, a setting, the command line. Other folders are nobody's copies.
pub fn cached_is_whole(path: &Path) -> Result<(), ModelError> {
    let is_known = engine::mutant!("a-base-that-is-named-is-not-checked", is_cached(path), false);
    if is_known { is_whole(path).map_err(ModelError::Cached) } else { Ok(()) }
}

fn is_whole(path: &Path) -> Result<(), String> {
    // Where it really is: removing a link to it would change nothing.
    let path = &path.canonicalize().unwrap_or_else(|_| path.into());
    let damaged = |name: &str| {
        let (file, path) = (path.join(name), path.display());
        format!(
            "{} of the base that was trained here is damaged: delete its folder, and it is trained again (rm -r {path})",
            file.display()
        )
    };
    let sums = files_of(path, &path.join(SUMS)).ok_or_else(|| damaged(SUMS))?;
    // Whatever else lies there would become part of the models that are made of it.
    let others = std::fs::read_dir(path).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    if let Some(other) = others.into_iter().find(|name| name != SUMS && !sums.contains_key(name)) {
        return Err(damaged(&other));
    }
    sums.into_iter().find(|(name, sum)| checksum(&path.join(name)) != Some(*sum)).map_or(Ok(()), |(name, _)| Err(damaged(&name)))
}

fn checksum(path: &Path) -> Option<u64> {
    Some(xxh3_64(&crate::input::read(path).ok()?))
}

/// What a base has, and should have; none where that cannot be read.
fn files_of(dir: &Path, sums: &Path) -> Option<BTreeMap<String, u64>> {
    let found: BTreeMap<String, u64> = serde_json::from_slice(&crate::input::read(sums).ok()?).ok()?;
    let is_there = |name: &str| found.contains_key(name) || !dir.join(name).exists();
    (found.contains_key("config.json") && ["model.safetensors", "tokenizer.json", "tokenizer_config.json"].into_iter().all(is_there))
        .then_some(found)
        .filter(|found| found.keys().all(|name| Path::new(name).components().count() == 1 && !name.starts_with(['.', '/'])))
}

/// A model's folder, as transformers reads it.
fn write(dir: &Path, model: &Pretrained, s: &Session) -> Result<(), TrainError> {
    let weight = |(ours, theirs, _): (String, String, Vec<usize>)| {
        let t = s.store.get(&ours).ok_or_else(|| TrainError::Other(format!("the model has no weight '{ours}'")))?;
        Ok(Weight { name: theirs, meta: t.meta.clone(), bytes: t.bytes()?.into_owned() })
    };
    let weights = model.shape.weights().into_iter().map(weight).collect::<Result<Vec<_>, TrainError>>()?;
    debug_assert!(weights.iter().all(|w| w.meta.dtype == DType::F32));
    write_weights(dir, &weights, usize::MAX)?;
    model.shape.write(dir)?;
    let user = "{% if m['role'] == 'user' %}<|prompt|>{{ m['content'] }}{% else %}<|reply|>{{ m['content'] }}<|end|>{% endif %}";
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "clean_up_tokenization_spaces": false,
        "model_max_length": model.seq,
        "chat_template": format!("{{% for m in messages %}}{user}{{% endfor %}}{{% if add_generation_prompt %}}<|reply|>{{% endif %}}"),
    });
    for (name, text) in [("tokenizer.json", Quiz::get().tokenizer_json()), ("tokenizer_config.json", format!("{config:#}\n"))] {
        let path = dir.join(name);
        files::write_new(&path, text.as_bytes()).map_err(ModelError::io("write", &path))?;
    }
    let mut sums = BTreeMap::new();
    for entry in std::fs::read_dir(dir).map_err(ModelError::io("list", dir))? {
        let name = entry.map_err(ModelError::io("list", dir))?.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') {
            let path = dir.join(&name);
            sums.insert(name, xxh3_64(&crate::input::read(&path).map_err(ModelError::io("read", &path))?));
        }
    }
    write_json(&dir.join(SUMS), &json!(sums))?;
    Ok(())
}
