//! Numbers of a config that nobody means: refused by key, value and range before anything is recorded, and never a panic.

use engine::{Compiled, Cpu, Device};
use kiln::config::Config;
use kiln::recipe::{self, TrainError};
use kiln::run;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Each recipe as small as it goes.
const RECIPES: &[(&str, &[&str])] = &[
    ("hydra", &["dim=16", "blocks=1", "hidden=16", "seq=8", "batch=2", "heads=2", "kv_heads=1", "eval_batches=1"]),
    ("vision_bdh", &["patch=16", "dim=12", "loops=1", "multiplier=2", "classes=2", "batch=2", "eval_batches=1"]),
    ("lior", &["dim=16", "layers=1", "seq=8", "after=4", "memory=8", "field=[2,2,4,4]", "model.steps=2", "batch=2", "eval_batches=1"]),
    ("hrm", &["dim=16", "heads=2", "layers=1", "hidden=16", "batch=2", "train_puzzles=4", "test_puzzles=2", "eval_batches=1"]),
    (
        "hrm_lm",
        &[
            "dim=16",
            "heads=2",
            "encoder_layers=1",
            "decoder_layers=1",
            "ff=2",
            "experts=2",
            "high_slots=2",
            "low_slots=3",
            "low_steps=1",
            "prefix=2",
            "batch=2",
            "eval_batches=1",
        ],
    ),
    (
        "polychromic",
        &[
            "pretrain=0",
            "dim=16",
            "layers=1",
            "heads=2",
            "kv_heads=1",
            "head_dim=8",
            "hidden=16",
            "seq=48",
            "rank=2",
            "batch=2",
            "prompts=2",
            "new_tokens=4",
            "eval_batches=1",
        ],
    ),
];

/// A picture of each of two classes, to learn from and to validate with: drawing a set takes seconds.
fn pictures(dir: &Path) {
    for (split, class) in [("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")] {
        let folder = dir.join(split).join(class);
        fs::create_dir_all(&folder).unwrap();
        image::RgbImage::from_pixel(32, 32, image::Rgb([50, 100, split.len() as u8])).save(folder.join("one.png")).unwrap();
    }
}

fn base(name: &str, sets: &[&str], dir: &Path) -> Config {
    let mut c = recipe::preset(recipe::find(name).unwrap(), None).unwrap();
    sets.iter().for_each(|s| c.set(s).unwrap());
    if name == "vision_bdh" {
        c.set(&format!("data.path={}", dir.display())).unwrap();
    }
    c
}

/// What becomes of an assignment: Err is the refusal, and a panic is none.
fn attempt(base: &Config, assignment: &str, what: impl Fn(&Config) -> Result<(), TrainError>) -> Result<(), String> {
    let mut c = base.clone();
    c.set(assignment).map_err(|e| e.to_string())?;
    match catch_unwind(AssertUnwindSafe(|| what(&c))) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(_) => panic!("{} with {assignment} panicked", c.text("recipe")),
    }
}

/// (section.key, whether it is a whole number) of every number.
fn keys(c: &Config) -> Vec<(String, bool)> {
    let json = c.to_json();
    let all = ["model", "data", "objective", "train"]
        .into_iter()
        .flat_map(|s| json[s].as_object().into_iter().flatten().map(move |(k, v)| (s, k, v)));
    all.filter(|(_, _, v)| v.is_number()).map(|(s, k, v)| (format!("{s}.{k}"), !v.is_f64())).collect()
}

#[test]
fn numbers_that_nobody_means_are_refused_by_key_and_value() {
    let dir = tempfile::tempdir().unwrap();
    pictures(dir.path());
    let mut accepted = vec![];
    for (name, sets) in RECIPES {
        let base = base(name, sets, dir.path());
        let check = |c: &Config| recipe::find(name)?.task(c).map(|_| ());
        attempt(&base, "seed=1", check).unwrap();
        for (key, whole) in keys(&base) {
            let values: &[&str] = match whole {
                // Counts of steps and of puzzles may be as large as one likes to wait for.
                true => &["9223372036854775807", "-1"],
                false => &["nan", "inf", "-inf", "1e308", "-1e308", "1e-308", "1e-45", "1e38", "-1e38"],
            };
            for value in values {
                let shown = match *value {
                    "1e-308" | "1e-45" | "1e308" | "-1e308" | "1e38" | "-1e38" => {
                        format!("{:?}", value.parse::<f64>().unwrap())
                    }
                    other => other.to_string(),
                };
                match attempt(&base, &format!("{key}={value}"), check) {
                    Ok(()) => accepted.push(format!("{name} {key}={value}")),
                    Err(e) => assert!(e.contains(&key) && e.contains(&shown), "{name} {key}={value} ({shown}): {e}"),
                }
            }
        }
    }
    // `keep` counts checkpoints, of which no run has as many.
    accepted.retain(|a| !a.ends_with("train.keep=9223372036854775807"));
    assert!(accepted.is_empty(), "accepted: {accepted:#?}");
}

/// Small ones are the ones that code forgets: each is refused, or recorded and planned.
#[test]
fn small_sizes_are_refused_or_recorded() {
    let dir = tempfile::tempdir().unwrap();
    pictures(dir.path());
    let target = Device::cpu(Cpu::new(1)).target();
    for (name, sets) in RECIPES {
        let base = base(name, sets, dir.path());
        let plan = |c: &Config| {
            let (task, switches) = (recipe::find(name)?.task(c)?, c.switches()?);
            task.graphs().into_iter().try_for_each(|(_, g)| Compiled::new(g, &switches, target).map(|_| ()))?;
            Ok(())
        };
        for (key, _) in keys(&base).iter().filter(|(key, whole)| *whole && !key.starts_with("train.")) {
            for value in [0, 1, 3] {
                if let Err(e) = attempt(&base, &format!("{key}={value}"), plan) {
                    assert!(e.contains(key.split_once('.').unwrap().1), "{name} {key}={value}: {e}");
                }
            }
        }
    }
}

/// At the ends of their ranges numbers may be useless, but nothing overflows into numbers that are not finite.
#[test]
fn the_ends_of_ranges_are_finite() {
    let dir = tempfile::tempdir().unwrap();
    let ends: &[(&str, &[&str])] = &[
        (
            "hydra",
            &[
                "rope_theta=1.0",
                "rope_theta=1e12",
                "norm_eps=1e-30",
                "norm_eps=1.0",
                "router_weight=1e6",
                "clip=1e30",
                "train.eps=1e-38",
                "weight_decay=1e3",
            ],
        ),
        ("lior", &["beta=1e6", "nudge=1e6", "nudge=-1e6", "rotor_rate=1e6", "mass=1e6", "model.eps=1e-30"]),
        ("hrm", &["balance_weight=1e6", "halt_weight=1e6", "rope_theta=1.0", "explore=1.0"]),
        (
            "polychromic",
            &["alpha=1e6", "alpha=-1e6", "objective.weight=1e6", "temperature=1e-6", "temperature=1e6", "top_p=1e-30", "skew=1.0"],
        ),
    ];
    for (name, assignments) in ends {
        let sets = RECIPES.iter().find(|r| r.0 == *name).unwrap().1;
        for assignment in *assignments {
            let one = |c: &Config| {
                let mut task = recipe::find(name)?.task(c)?;
                let mut s = run::load(&*task, c, &Device::cpu(Cpu::new(1)))?;
                task.begin(0)?;
                for step in 0..2 {
                    task.step(&mut s, step, 1e-3)?;
                }
                let seen = task.report(&s)?.finish()?.values;
                let bad = |(n, v): &&(String, f64)| !v.is_finite() || n == "skipped" && *v > 0.0;
                assert!(seen.iter().find(bad).is_none(), "{name} {assignment}: {seen:?}");
                Ok(())
            };
            attempt(&base(name, sets, dir.path()), assignment, one).unwrap_or_else(|e| panic!("{name} {assignment}: {e}"));
        }
    }
}
