//! vision_bdh: an image classifier, one Dragon-Hatchling layer applied over and over.

mod classify;
mod model;

pub use model::{VisionBdh, VisionConfig, correct};

use crate::config::{Config, ConfigError, Keys, Section, TrainConfig};
use crate::data::images::pictures::{CASES, augmented_pictures, pictures};
use crate::data::images::{self, GENERATED, ImageSet, generate};
use crate::data::{DataError, Item, Source, Split};
use crate::golden::{Golden, Record, Steps, differentiated};
use crate::recipe::{
    Better, Classifier, Classifies, Computed, Feeds, Metric, Model, Reads, Recipe, Reference, Session, Supervised, Task, TrainError, Unit,
};
use crate::{choices, section};
use engine::op::Entry;
use engine::{DType, Data, Device, Extension, Init, Meta, Recorder, Switches, Var};
use std::cell::OnceCell;
use std::path::Path;
use std::sync::Arc;

static EXTENSION: Extension = Extension {
    ops: &[Entry { name: "pictures", about: "pictures out of a set of bytes, cut, resized and mirrored at random", cases: CASES }],
    passes: &[],
};

/// Patches a side that pictures of a folder have at least, where nobody set another size of patches.
const PATCHES: usize = 4;

pub struct VisionRecipe;

section! {
    /// Where pictures come from, and how they are augmented.
    struct PictureConfig {
        /// A folder in the format of CIFAR-10 or CIFAR-100, one of parquet files with pictures, or one of pictures with a folder for each class. Empty: drawn
        /// pictures.
        path: String = String::new(), [path];
        /// Share of the training pictures that is held out for validation, where the data has no such split. A test split is left for `kiln eval --split
        /// test`. 0: the test split validates.
        val_share: f64 = images::VAL_SHARE, in 0.0..1.0;
        /// Where the set is kept while training. auto: on the device where it takes at most half of the free memory.
        keep: Keep = Keep::Auto;
        /// Smallest share of a picture's area that a random crop leaves.
        least_area: f32 = 0.8, in 1e-38..=1.0;
        /// Whether pictures are mirrored every other time; not where left and right mean something, as in digits.
        mirror: bool = true;
    }
}

#[derive(Clone, Copy, Debug)]
enum Keep {
    Auto,
    Device,
    Host,
}

choices!(Keep { Auto: "auto", Device: "device", Host: "host" });

impl Recipe for VisionRecipe {
    fn name(&self) -> &'static str {
        "vision_bdh"
    }

    fn about(&self) -> &'static str {
        "an image classifier: one Dragon-Hatchling layer, applied over and over"
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn sections(&self) -> Vec<Keys> {
        vec![VisionConfig::keys("model"), PictureConfig::keys("data"), TrainConfig::keys("train")]
    }

    fn extension(&self) -> Option<&'static Extension> {
        Some(&EXTENSION)
    }

    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("tiny", include_str!("../../../configs/vision_bdh-tiny.toml")),
            ("cifar10", include_str!("../../../configs/vision_bdh-cifar10.toml")),
        ]
    }

    fn sized(&self, config: &Config) -> Result<Config, TrainError> {
        let mut config = config.clone();
        let mut own = None;
        config.size("model.image", |c| {
            let (data, model): (PictureConfig, VisionConfig) = (c.section("data")?, c.section("model")?);
            let side = if data.path.is_empty() { None } else { images::side(Path::new(&data.path))? };
            own = side.filter(|side| side.is_multiple_of(model.patch));
            Ok::<_, TrainError>(own.unwrap_or(images::SIZE))
        })?;
        // Small pictures have small patches: of one patch alone there would be nothing to attend to.
        let patch = config.section::<VisionConfig>("model")?.patch;
        if let Some(side) = own.filter(|side| side / patch < PATCHES) {
            let fits = |patch: &usize| side.is_multiple_of(*patch) && side / patch >= PATCHES;
            config.set_default("model.patch", ((1..=patch).rev().find(fits).unwrap_or(1) as i64).into())?;
        }
        config.size("model.classes", |c| match c.section::<PictureConfig>("data")?.path.as_str() {
            "" => Ok(images::GENERATED_CLASSES.len()),
            path => Ok::<_, TrainError>(images::classes(Path::new(path))?),
        })?;
        Ok(config)
    }

    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        let config = &self.sized(config)?;
        let c: VisionConfig = config.section("model")?;
        c.check()?;
        let data: PictureConfig = config.section("data")?;
        let train: TrainConfig = config.section("train")?;
        train.check()?;
        let seed = config.seed();
        let (learn, validate, test) = match data.path.as_str() {
            "" if c.image != images::SIZE => {
                return Err(
                    ConfigError::Invalid(format!("model.image = {}: drawn pictures have {} pixels a side", c.image, images::SIZE)).into()
                );
            }
            "" => (generate(seed, Split::Train, GENERATED[0]), generate(seed, Split::Val, GENERATED[1]), None),
            path => {
                let sets = images::open(Path::new(path), None, c.image, data.val_share)?;
                (sets.train, sets.val, sets.test)
            }
        };
        if learn.classes.len() != c.classes {
            let (n, has) = (learn.classes.len(), c.classes);
            return Err(ConfigError::Invalid(format!(
                "the pictures have {n} classes, but model.classes = {has} (train with --set model.classes={n})"
            ))
            .into());
        }
        let sets = [Arc::new(learn), Arc::new(validate)];
        Ok(Box::new(Supervised::new(
            VisionModel {
                c,
                least_area: data.least_area,
                mirror: data.mirror,
                keep: data.keep,
                resident: OnceCell::new(),
                sets,
                test: test.map(Arc::new),
            },
            train,
            seed,
        )))
    }

    fn reads(&self) -> &'static [Reads] {
        &[Reads::Pictures]
    }

    fn classifies(&self) -> Option<&dyn Classifies> {
        Some(self)
    }

    fn reference(&self) -> Option<&dyn Reference> {
        Some(self)
    }
}

impl Classifies for VisionRecipe {
    fn classifier(&self, config: &Config, identity: &serde_json::Value) -> Result<Box<dyn Classifier>, TrainError> {
        Ok(Box::new(classify::VisionClassifier::new(config, identity)?))
    }
}

impl Reference for VisionRecipe {
    fn file(&self) -> &'static [u8] {
        include_bytes!("../../../../reference/golden/vision_bdh.safetensors")
    }

    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
        golden(file, switches, device)
    }
}

const METRICS: &[Metric] = &[
    Metric::new("loss", Unit::Nats, Better::Lower, "cross-entropy of a picture's class"),
    Metric::new("accuracy", Unit::Share, Better::Higher, "of the pictures, those whose class is guessed"),
];

struct VisionModel {
    c: VisionConfig,
    least_area: f32,
    mirror: bool,
    keep: Keep,
    /// Whether the sets are on the device; decided once, before the first graph.
    resident: OnceCell<bool>,
    /// To learn from, and to validate with.
    sets: [Arc<ImageSet>; 2],
    /// What nothing is chosen by.
    test: Option<Arc<ImageSet>>,
}

/// Names of the sets on the device: they mean nothing to a checkpoint.
const SETS: [&str; 2] = ["scratch/pictures/train", "scratch/pictures/val"];
/// The pictures of a batch, where the sets stay on the host.
const FED: &str = "pictures";

/// Loss and accuracy of logits, weighted: what a step reports.
fn losses<'g>(logits: Var<'g>, targets: Var<'g>, weight: Var<'g>) -> Vec<(&'static str, Var<'g>)> {
    vec![("loss", (logits.cross_entropy(targets) * weight).sum()), ("accuracy", (correct(logits, targets) * weight).sum())]
}

impl VisionModel {
    fn meta(&self, set: usize) -> Meta {
        Meta::new(&[self.sets[set].len(), images::CHANNELS, self.c.image, self.c.image], DType::U8)
    }

    fn resident(&self) -> bool {
        *self.resident.get_or_init(|| !matches!(self.keep, Keep::Host))
    }

    /// The set on the device or what of it a batch needs, the places and labels of the batch.
    fn feeds<'g>(&self, r: &'g Recorder, batch: usize, set: usize) -> (Var<'g>, Var<'g>, Feeds<'g>) {
        let f = Feeds::new(r, batch, 1);
        let mut shape = self.meta(set).shape;
        let pictures = if self.resident() {
            r.state(SETS[set], &shape, DType::U8, Init::Full(0.0))
        } else {
            shape[0] = batch;
            r.feed(FED, &shape, DType::U8)
        };
        (pictures, f.ids.reshape(&[batch]), f)
    }
}

impl Model for VisionModel {
    fn seq(&self) -> usize {
        1
    }

    fn unit(&self) -> &'static str {
        "img"
    }

    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let (set, index, f) = self.feeds(r, batch, 0);
        let images = augmented_pictures(
            set,
            index,
            f.rng,
            engine::mutant!("pictures-never-cut", self.least_area, 1.0),
            engine::mutant!("pictures-always-mirrored", self.mirror, true),
        );
        let logits = VisionBdh { c: &self.c, r, rng: Some(f.rng) }.logits(images);
        losses(logits, f.targets.reshape(&[batch]), f.weight)
    }

    fn evaluate<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let (set, index, f) = self.feeds(r, batch, 1);
        let pictures = engine::mutant!(
            "augmentation-in-evaluation",
            pictures(set, index),
            augmented_pictures(set, index, f.rng, self.least_area, self.mirror)
        );
        let logits = VisionBdh { c: &self.c, r, rng: engine::mutant!("dropout-in-evaluation", None, Some(f.rng)) }.logits(pictures);
        r.output("logits", logits);
        losses(logits, f.targets.reshape(&[batch]), f.weight)
    }

    fn metrics(&self) -> &'static [Metric] {
        METRICS
    }

    fn settle(&self, free: Option<u64>) {
        let bytes: usize = self.sets.iter().map(|s| s.pixels.len()).sum();
        self.resident.get_or_init(|| match self.keep {
            Keep::Auto => free.is_none_or(|free| bytes as u64 <= free / 2),
            Keep::Device => true,
            Keep::Host => false,
        });
    }

    fn more(&self, train: bool, ids: &mut [i32]) -> Option<(&'static str, Vec<u8>)> {
        if self.resident() {
            return None;
        }
        let set = &self.sets[!train as usize];
        let pictures = ids.iter().flat_map(|&i| set.item(i as usize).0).copied().collect();
        ids.iter_mut().enumerate().for_each(|(place, id)| *id = place as i32);
        Some((FED, pictures))
    }

    fn prepare(&self, s: &mut Session) -> Result<(), TrainError> {
        for (i, name) in SETS.iter().enumerate() {
            if s.store.get(name).is_some() {
                s.store.set(name, &self.meta(i), &self.sets[i].pixels)?;
            }
        }
        Ok(())
    }

    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(Arc::new(Labels(self.sets[!train as usize].clone())))
    }

    fn has_test(&self) -> bool {
        self.test.is_some()
    }

    fn validate_on_test(&mut self) -> bool {
        match &self.test {
            Some(test) => self.sets[1] = test.clone(),
            None => return false,
        }
        true
    }

    fn epoch(&self) -> Option<u64> {
        Some(self.sets[0].len() as u64)
    }

    fn classes(&self) -> &[String] {
        &self.sets[0].classes
    }

    fn vocab(&self) -> usize {
        self.c.classes.min(self.sets[0].len())
    }

    fn identity(&self) -> Result<serde_json::Value, TrainError> {
        let [data, validation] = [&self.sets[0], engine::mutant!("other-validation-pictures", &self.sets[1], &self.sets[0])]
            .map(|set| format!("{:016x}", set.fingerprint()));
        Ok(serde_json::json!({ "data": data, "validation": validation, "classes": self.sets[0].classes }))
    }
}

/// Item i is its own number and its label: the pictures are on the device.
struct Labels(Arc<ImageSet>);

impl Source for Labels {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        let label = *self.0.labels.get(i as usize).ok_or(DataError::OutOfRange { item: i, len: self.len() })?;
        Ok(Item { ids: vec![i as i32], targets: vec![label as i32], ..Item::default() })
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

fn golden(file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError> {
    let bad = |m: &str| TrainError::Other(format!("this golden file {m}"));
    let c = VisionConfig::from_json("model", &file.config).map_err(|e| bad(&format!("has a config that vision_bdh does not know: {e}")))?;
    c.check()?;
    let shape = file.shape("input/images").filter(|s| s.len() == 4 && s[1..] == [3, c.image, c.image]);
    let shape = shape.ok_or_else(|| bad("has no input/images [batch, 3, image, image] of its config"))?;
    let (Some(images), Some(labels)) = (file.f32("input/images"), file.i32("input/labels")) else {
        return Err(bad("has no numbers as input/images and input/labels"));
    };
    if labels.len() != shape[0] || !labels.iter().all(|l| (0..c.classes as i32).contains(l)) {
        return Err(bad("has labels that do not fit its config"));
    }
    // Golden files are made without dropout.
    let c = VisionConfig { dropout: 0.0, ..c };
    fn logits<'g>(c: &VisionConfig, r: &'g Recorder, shape: &[usize]) -> Var<'g> {
        VisionBdh { c, r, rng: None }.logits(r.feed("images", shape, DType::F32))
    }
    fn values<'g>(c: &VisionConfig, r: &'g Recorder, shape: &[usize]) -> Vec<(&'static str, Var<'g>)> {
        losses(logits(c, r, shape), r.feed("labels", &shape[..1], DType::I32), r.full(&[1], 1.0 / shape[0] as f32))
    }
    let feeds = [("images", Data::F32(&images)), ("labels", Data::I32(&labels))];
    let outputs: Record = &|r| vec![("logits", logits(&c, r, &shape))];
    differentiated(
        file,
        switches,
        device,
        &Steps { losses: &|r| values(&c, r, &shape), outputs, feeds: &feeds, frozen: &[], called: &str::to_string },
    )
}
