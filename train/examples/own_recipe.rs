//! A recipe of one's own, with kiln's whole command line: train, resume, eval, plan, bench and the rest.
//!
//!     cargo run --release -p kiln --example own_recipe -- train --out runs/mine

use engine::{DType, Data, Init, Recorder, Var};
use kiln::config::{Config, Keys, Section, TrainConfig};
use kiln::data::{Generated, Source, Split};
use kiln::recipe::{Feeds, Model, Recipe, Session, Supervised, Task, TrainError};
use kiln::sample::{Sampling, choose};
use std::sync::Arc;

kiln::section! {
    /// Bytes in, bytes out: causal convolutions on a residual stream.
    struct Mine {
        /// Width of the residual stream.
        dim: usize = 64, in 1..=4096;
        /// Tokens of a sequence.
        seq: usize = 64, in 32..=4096;
    }
}

impl Mine {
    /// ids [batch, time] -> hidden [batch, time, dim], and the table that is embedding and head.
    fn hidden<'g>(&self, r: &'g Recorder, ids: Var<'g>) -> (Var<'g>, Var<'g>) {
        let table = r.param("embedding", &[256, self.dim], Init::Normal { std: 0.1 });
        let mut h = table.gather_rows(ids);
        for i in 0..3 {
            let norm = r.param(&format!("norm.{i}"), &[self.dim], Init::Full(1.0));
            let conv = r.param(&format!("conv.{i}"), &[self.dim, self.dim, 4], Init::Normal { std: 0.5 / (self.dim as f32).sqrt() });
            h = r.block(&format!("layers.{i}"), || h + h.rms_norm(norm, 1e-6).causal_conv(conv, 1).silu());
        }
        (h, table)
    }
}

impl Model for Mine {
    fn seq(&self) -> usize {
        self.seq
    }
    fn vocab(&self) -> usize {
        256
    }
    fn loss<'g>(&self, r: &'g Recorder, batch: usize) -> Vec<(&'static str, Var<'g>)> {
        let (f, rows) = (Feeds::new(r, batch, self.seq), batch * self.seq);
        let (h, table) = self.hidden(r, f.ids);
        vec![("loss", h.reshape(&[rows, self.dim]).linear_cross_entropy(table, f.targets.reshape(&[rows]), f.weight))]
    }
    fn source(&self, train: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(Arc::new(Generated::new(0, if train { Split::Train } else { Split::Val }, self.seq, 1 << 20, vec![])?))
    }
    /// A sample when training ends: another program over the same parameters.
    fn show(&self, s: &mut Session) -> Result<Option<String>, TrainError> {
        let r = Recorder::new();
        let (h, table) = self.hidden(&r, r.feed("ids", &[1, 32], DType::I32));
        r.output("logits", h.slice(1, 31, 32).reshape(&[1, self.dim]).linear(table));
        s.load("next", r.finish())?;
        let mut text: Vec<i32> = " ".repeat(28).bytes().chain(*b"\nthe").map(i32::from).collect();
        let sampling = Sampling { temperature: 0.7, top_p: 0.9, seed: 0, max_tokens: 0, stop: vec![], stop_text: vec![] };
        for i in 0..100 {
            s.run("next", &[("ids", Data::I32(&text[text.len() - 32..]))])?;
            text.push(choose(&s.read("next", "logits")?, &sampling, i) as i32);
        }
        Ok(Some(text[29..].iter().map(|&b| b as u8 as char).collect()))
    }
}

struct MyRecipe;

impl Recipe for MyRecipe {
    fn name(&self) -> &'static str {
        "mine"
    }
    fn about(&self) -> &'static str {
        "causal convolutions over bytes"
    }
    fn sections(&self) -> Vec<Keys> {
        vec![Mine::keys("model"), TrainConfig::keys("train")]
    }
    fn presets(&self) -> &'static [(&'static str, &'static str)] {
        &[("demo", "# Half a minute on two cores.\n[train]\nsteps = 150\nbatch = 8\nlearning_rate = 5e-3\n")]
    }
    fn task(&self, config: &Config) -> Result<Box<dyn Task>, TrainError> {
        Ok(Box::new(Supervised::new(config.section::<Mine>("model")?, config.section::<TrainConfig>("train")?, config.seed())))
    }
}

fn main() -> std::process::ExitCode {
    kiln::main(&[&MyRecipe])
}
