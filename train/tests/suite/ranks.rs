//! Several ranks, as threads, train what one rank trains.

use engine::ranks::threads;
use engine::{Cpu, Device};
use kiln::recipe::{self, Recipe};
use kiln::recipes::RECIPES;
use kiln::run::{self, Options, Start};
use std::path::Path;

/// Trains some steps on `data` times `tensor` ranks in a folder.
pub fn train(recipe: &dyn Recipe, settings: &[&str], [data, tensor]: [usize; 2], out: &Path, start: Start) {
    let ended = threads::each(data, tensor, |ranks| {
        let mut config = recipe::preset(recipe, None).unwrap();
        settings.iter().for_each(|s| config.set(s).unwrap());
        let mut config = recipe.sized(&config).unwrap();
        config.ranks = ranks;
        let options = Options { out: out.into(), start: start.clone(), ..Options::default() };
        let mut task = recipe.task(&config).unwrap();
        run::train(&mut *task, &config, &Device::cpu(Cpu::new(1)), &options).map(|f| f.step).map_err(|e| e.to_string())
    });
    for (rank, ended) in ended.into_iter().enumerate() {
        ended.unwrap_or_else(|e| panic!("{} {data}x{tensor}, rank {rank}: {e}", recipe.name()));
    }
}

#[test]
fn every_recipe() {
    for recipe in RECIPES {
        let settings = ["train.steps=5", "train.log_every=1", "train.batch=4", "train.eval_every=5", "train.eval_batches=1"];
        for ranks in [[1, 1], [2, 1], [4, 1], [1, 2]] {
            let dir = tempfile::tempdir().unwrap();
            let started = std::time::Instant::now();
            train(*recipe, &settings, ranks, &dir.path().join("run"), Start::New);
            let losses: Vec<_> = losses(&dir.path().join("run"));
            println!("{} {ranks:?} {:?} {losses:?}", recipe.name(), started.elapsed());
        }
    }
}
