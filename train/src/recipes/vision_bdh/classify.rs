//! Classes of pictures that are handed in, with the weights of a checkpoint and without its data.

use super::{VisionBdh, VisionConfig};
use crate::config::Config;
use crate::data::images::CHANNELS;
use crate::data::images::pictures::pictures;
use crate::recipe::{Classifier, Session, TrainError};
use engine::{DType, Data, Recorder};

pub struct VisionClassifier {
    c: VisionConfig,
    classes: Vec<String>,
    batch: usize,
}

impl VisionClassifier {
    pub fn new(config: &Config, identity: &serde_json::Value) -> Result<VisionClassifier, TrainError> {
        let c: VisionConfig = config.section("model")?;
        c.check()?;
        let classes: Vec<String> = serde_json::from_value(identity["classes"].clone()).unwrap_or_default();
        if classes.len() != c.classes {
            let (names, has) = (classes.len(), c.classes);
            return Err(TrainError::Other(format!("the checkpoint names {names} classes, but its model has {has}: train it anew")));
        }
        Ok(VisionClassifier { c, classes, batch: 0 })
    }

    fn shape(&self) -> [usize; 4] {
        [self.batch, CHANNELS, self.c.image, self.c.image]
    }
}

impl Classifier for VisionClassifier {
    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn size(&self) -> usize {
        self.c.image
    }

    fn begin(&mut self, s: &mut Session, batch: usize) -> Result<(), TrainError> {
        self.batch = batch;
        let r = Recorder::new();
        let pictures = pictures(r.feed("pictures", &self.shape(), DType::U8), r.feed("index", &[batch], DType::I32));
        r.output("logits", VisionBdh { c: &self.c, r: &r, rng: None }.logits(pictures));
        s.load("predict", r.finish())
    }

    fn logits(&mut self, s: &mut Session, pictures: &[u8]) -> Result<Vec<f32>, TrainError> {
        let picture = self.shape()[1..].iter().product::<usize>();
        let index: Vec<i32> = (0..self.batch as i32).collect();
        let mut all = vec![];
        for part in pictures.chunks(self.batch * picture) {
            // The last batch is filled up with black pictures, whose logits nobody reads.
            let mut whole = part.to_vec();
            whole.resize(self.batch * picture, 0);
            s.run("predict", &[("pictures", Data::U8(&whole)), ("index", Data::I32(&index))])?;
            all.extend(&s.read("predict", "logits")?[..part.len() / picture * self.classes.len()]);
        }
        Ok(all)
    }
}
