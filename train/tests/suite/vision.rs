//! A classifier from its pictures to its guesses: trained, stopped, resumed, evaluated, asked; on pictures written here.

use crate::common::*;
use engine::philox::philox;
use engine::{Cpu, Data, Device};
use image::{Rgb, RgbImage};
use kiln::checkpoint;
use kiln::config::Config;
use kiln::{recipe, run};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::{TempDir, tempdir};

const CLASSES: [&str; 4] = ["column", "corner", "frame", "row"];
const SIDE: u32 = 16;
const BATCH: u64 = 16;
/// Of each class; neither set is a whole number of batches.
const TRAIN: u32 = 37;
const VAL: u32 = 11;

/// Picture `number` of a class: bright where the class says, noise everywhere.
fn drawn(class: usize, number: u32) -> RgbImage {
    let at = 3 + number % 10;
    RgbImage::from_fn(SIDE, SIDE, |x, y| {
        let bright = match class {
            0 => x.abs_diff(at) < 2,
            1 => x.min(y) < 3,
            2 => x.min(y).min(SIDE - 1 - x).min(SIDE - 1 - y) < 2,
            _ => y.abs_diff(at) < 2,
        };
        let noise = philox([x, y, number, class as u32], [7, 7]);
        Rgb([0, 1, 2].map(|c| (noise[c] % 90) as u8 + if bright { 160 } else { 20 }))
    })
}

fn write_set(dir: &Path) -> PathBuf {
    for (split, from, count) in [("train", 0, TRAIN), ("val", 1000, VAL)] {
        for (class, name) in CLASSES.iter().enumerate() {
            let folder = dir.join(split).join(name);
            fs::create_dir_all(&folder).unwrap();
            (from..from + count).for_each(|i| drawn(class, i).save(folder.join(format!("{i}.png"))).unwrap());
        }
    }
    dir.into()
}

fn vision(data: &Path, out: &Path, args: &str) -> Ran {
    let sizes = "--set image=16 --set patch=4 --set classes=4 --set dim=16 --set heads=2 --set multiplier=4 --set loops=2";
    let rest = format!("--set batch={BATCH} --set horizon=60 --set warmup=5 --set log_every=1 --threads 1");
    let (data, out) = (data.display(), out.display());
    kiln(format!("train vision_bdh {sizes} {rest} --data {data} --out {out} {args}").split_whitespace())
}

/// A data set and a run of 60 steps on it.
fn trained() -> (TempDir, PathBuf, PathBuf) {
    let dir = tempdir().unwrap();
    let (data, out) = (write_set(&dir.path().join("data")), dir.path().join("run"));
    vision(&data, &out, "--steps 60").ok();
    (dir, data, out)
}

fn json(args: &[&str]) -> Value {
    let ran = kiln(args).ok();
    serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{args:?}: {e}: {}", ran.out))
}

/// The last record of each step, without what a clock measured.
fn by_step(out: &Path) -> BTreeMap<u64, Value> {
    let mut all = BTreeMap::new();
    for mut record in records(out, "train") {
        for timed in ["per_second", "step_ms", "data_wait_ms", "slow_steps"] {
            record.as_object_mut().unwrap().remove(timed);
        }
        all.insert(record["step"].as_u64().unwrap(), record);
    }
    all
}

#[test]
fn two_runs_and_a_resumed_one_have_the_same_bits() {
    let dir = tempdir().unwrap();
    let data = write_set(&dir.path().join("data"));
    let [first, second, parts] = ["first", "second", "parts"].map(|name| dir.path().join(name));
    vision(&data, &first, "--steps 24").ok();
    vision(&data, &second, "--steps 24").ok();
    vision(&data, &parts, "--steps 4").ok();
    // In the middle of the first epoch, and of the second.
    resume(&parts, "--steps 12").ok();
    resume(&parts, "--steps 24").ok();
    same_bytes(&checkpoint(&first, 24), &checkpoint(&second, 24));
    same_bytes(&checkpoint(&first, 24), &checkpoint(&parts, 24));
    // Pictures that stay on the host and are fed are the same pictures.
    let host = dir.path().join("host");
    vision(&data, &host, "--steps 24 --set data.keep=host").ok();
    same_bytes(&checkpoint(&first, 24), &checkpoint(&host, 24));
    let (whole, mut stopped) = (by_step(&first), by_step(&parts));
    assert_eq!(whole, by_step(&second));
    // Where it stopped, it evaluated too.
    for step in [4, 12] {
        stopped.get_mut(&step).unwrap().as_object_mut().unwrap().retain(|key, _| !key.starts_with("val_") && !key.starts_with("epoch_"));
    }
    assert_eq!(whole, stopped);
    assert_eq!(fs::read(first.join("confusion.png")).unwrap(), fs::read(parts.join("confusion.png")).unwrap());
}

#[test]
fn another_picture_to_validate_with_or_to_learn_from_is_refused() {
    let dir = tempdir().unwrap();
    let (data, out) = (write_set(&dir.path().join("data")), dir.path().join("run"));
    vision(&data, &out, "--steps 2").ok();
    for (split, number, what) in [("val", 1000, "the validation data"), ("train", 0, "the data")] {
        let path = data.join(split).join(CLASSES[0]).join(format!("{number}.png"));
        let before = fs::read(&path).unwrap();
        drawn(0, number + 500).save(&path).unwrap();
        resume(&out, "--steps 3").fails(&[what, "was"]);
        fs::write(&path, before).unwrap();
    }
    resume(&out, "--steps 3").ok();
}

/// Training sees pictures as the settings say.
#[test]
fn pictures_are_cut_and_mirrored_only_where_that_is_asked_for() {
    let dir = tempdir().unwrap();
    let data = write_set(&dir.path().join("data"));
    let loss = |mirror: bool, least_area: &str| {
        let out = dir.path().join(format!("{mirror}-{least_area}"));
        vision(&data, &out, &format!("--steps 1 --set data.mirror={mirror} --set data.least_area={least_area}")).ok();
        records(&out, "train")[0]["loss"].as_f64().unwrap()
    };
    let all = [loss(false, "1.0"), loss(true, "1.0"), loss(false, "0.5"), loss(true, "0.5")];
    for (i, a) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|b| a != b), "{all:?}");
    }
}

#[test]
fn the_preset_for_cifar_computes_in_bf16() {
    let plan = kiln(["plan", "vision_bdh", "--preset", "cifar10", "--for-sm", "90"]).ok().out;
    let bf16 = plan.lines().find(|l| l.starts_with("bf16 ")).unwrap();
    assert_eq!(bf16.split_whitespace().nth(1), Some("auto"), "{bf16}");
}

#[test]
fn micro_batches_in_bf16_report_in_f32() {
    let dir = tempdir().unwrap();
    let (data, out) = (write_set(&dir.path().join("data")), dir.path().join("run"));
    vision(&data, &out, "--steps 3 --set accumulate=2 --pass bf16=auto").ok();
    assert!(by_step(&out)[&3]["grad_norm"].as_f64().unwrap() > 0.0);
}

#[test]
fn every_epoch_is_evaluated_and_written_down() {
    let dir = tempdir().unwrap();
    let (data, out) = (write_set(&dir.path().join("data")), dir.path().join("run"));
    let said = vision(&data, &out, "--steps 30").ok().out;
    let items = 4 * u64::from(TRAIN);
    let ends: Vec<u64> = (1..=30).filter(|s| s * BATCH / items > (s - 1) * BATCH / items || *s == 30).collect();
    assert_eq!(ends, [10, 19, 28, 30], "148 pictures in batches of 16");
    let all = by_step(&out);
    let evaluated: Vec<u64> = all.iter().filter(|(_, r)| r.get("val_loss").is_some()).map(|(s, _)| *s).collect();
    assert_eq!(evaluated, ends);
    for (epoch, steps) in [("1", 1..=10), ("2", 11..=19), ("3", 20..=28), ("3.24", 29..=30)] {
        let last = &all[steps.end()];
        for name in ["loss", "accuracy"] {
            let mean = steps.clone().map(|s| all[&s][name].as_f64().unwrap()).sum::<f64>() / steps.clone().count() as f64;
            assert!((last[format!("epoch_{name}")].as_f64().unwrap() - mean).abs() < 1e-12, "{last}");
        }
        assert_eq!(last["epoch"].as_f64().unwrap(), (steps.end() * BATCH) as f64 / items as f64);
        let share = |key: &str| 100.0 * last[key].as_f64().unwrap();
        let line = format!(
            "epoch {epoch} (step {}): training loss {:.4}, accuracy {:.2}%; validation loss {:.4}, accuracy {:.2}%",
            steps.end(),
            last["epoch_loss"].as_f64().unwrap(),
            share("epoch_accuracy"),
            last["val_loss"].as_f64().unwrap(),
            share("val_accuracy"),
        );
        assert!(said.contains(&line), "{line}\n{said}");
    }
    assert!(said.contains(&format!("confusion matrix {}", out.join("confusion.png").display())), "{said}");

    let other = dir.path().join("other");
    vision(&data, &other, "--steps 20 --set eval_every=8").ok();
    let evaluated: Vec<u64> = by_step(&other).iter().filter(|(_, r)| r.get("val_loss").is_some()).map(|(s, _)| *s).collect();
    assert_eq!(evaluated, [8, 16, 20]);
}

/// (true, guessed) -> how often.
type Guesses = BTreeMap<(u64, u64), u64>;

fn guesses(evaluated: &Value) -> Guesses {
    let number = |v: &Value| v.as_u64().unwrap();
    let all = evaluated["confusion"]["guesses"].as_array().unwrap();
    all.iter().map(|g| ((number(&g[0]), number(&g[1])), number(&g[2]))).collect()
}

#[test]
fn evaluation_prediction_and_training_agree() {
    let (dir, data, out) = trained();
    let evaluated = json(&["eval", &text(&out), "--json", "--threads", "1"]);
    all_declared(&evaluated);
    let last = by_step(&out).into_values().next_back().unwrap();
    assert_eq!((&evaluated["loss"], &evaluated["accuracy"]), (&last["val_loss"], &last["val_accuracy"]));
    let accuracy = evaluated["accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.9, "it did not learn: {evaluated}");

    let matrix = guesses(&evaluated);
    let total = u64::from(4 * VAL);
    assert_eq!(matrix.values().sum::<u64>(), total, "each picture once, the last batch too");
    let right: u64 = (0..4).filter_map(|c| matrix.get(&(c, c))).sum();
    assert!((right as f64 / total as f64 - accuracy).abs() < 1e-6);
    for (class, name) in evaluated["confusion"]["classes"].as_array().unwrap().iter().zip(CLASSES) {
        assert_eq!((&class["class"], &class["pictures"]), (&name.into(), &VAL.into()));
    }
    let said = kiln(["eval", &text(&out)]).ok().out;
    let drawn = out.join("confusion-step-00000060.png");
    assert!(said.contains("column        11") && said.contains(&text(&drawn)), "{said}");
    let picture = |path: &Path| image::open(path).unwrap().into_rgb8();
    assert_eq!(picture(&drawn), picture(&out.join("confusion.png")), "the picture of the last step is that of the run's end");

    // The batch's size decides what fills up the last batch, and nothing else.
    let found = checkpoint::open(&crate::common::checkpoint(&out, 60)).unwrap();
    for batch in [1, 7, 44, 64] {
        let mut config = Config::from_json(&found.meta["config"]).unwrap();
        config.set(&format!("batch={batch}")).unwrap();
        let mut task = recipe::find("vision_bdh").unwrap().task(&config).unwrap();
        let mut s = run::load(&*task, &config, &Device::cpu(Cpu::new(1))).unwrap();
        s.load_params(&found.file("model.safetensors").unwrap(), "").unwrap();
        let again = task.evaluate(&mut s).unwrap();
        let confusion = again.confusion.unwrap();
        assert!((0..4).all(|t| (0..4).all(|g| confusion.count(t, g) == *matrix.get(&(t as u64, g as u64)).unwrap_or(&0))), "batch {batch}");
        let loss = evaluated["loss"].as_f64().unwrap();
        assert!((again.values[0].1 - loss).abs() < 1e-5 * (1.0 + loss), "batch {batch}: {} and {loss}", again.values[0].1);
    }

    // A checkpoint alone, without its data, sees in the files what evaluation saw.
    let alone = dir.path().join("alone");
    copy(&crate::common::checkpoint(&out, 60), &alone);
    let files: Vec<(u64, String)> = CLASSES
        .iter()
        .enumerate()
        .flat_map(|(class, name)| (1000..1000 + VAL).map(move |i| (class as u64, format!("{name}/{i}.png"))))
        .map(|(class, file)| (class, text(&data.join("val").join(file))))
        .collect();
    let moved = dir.path().join("moved");
    fs::rename(&data, &moved).unwrap();
    let files: Vec<(u64, String)> = files.into_iter().map(|(c, f)| (c, f.replace(&text(&data), &text(&moved)))).collect();
    let alone = text(&alone);
    let mut args = vec!["predict", &alone, "--json", "--top", "9"];
    args.extend(files.iter().map(|f| f.1.as_str()));
    let predicted = json(&args);
    let mut seen = Guesses::new();
    for ((class, file), one) in files.iter().zip(predicted["pictures"].as_array().unwrap()) {
        let guesses = one["guesses"].as_array().unwrap();
        let sum: f64 = guesses.iter().map(|g| g["probability"].as_f64().unwrap()).sum();
        assert!(one["picture"] == *file && guesses.len() == 4 && (sum - 1.0).abs() < 1e-9, "{one}");
        assert!(guesses.is_sorted_by(|a, b| a["probability"].as_f64() >= b["probability"].as_f64()));
        let best = CLASSES.iter().position(|c| guesses[0]["class"] == *c).unwrap();
        *seen.entry((*class, best as u64)).or_default() += 1;
    }
    assert_eq!(seen, matrix);
    kiln(["eval", &alone]).fails(&["cannot list", "data"]);
    // As many other classes in their place are not those that it tells apart.
    for split in ["train", "val"].map(|split| moved.join(split)) {
        fs::rename(split.join(CLASSES[0]), split.join("another")).unwrap();
    }
    fs::rename(&moved, &data).unwrap();
    kiln(["eval", &text(&out)]).fails(&["tells the classes", CLASSES[0], "another"]);
}

#[test]
fn pictures_of_any_size_are_taken_and_bad_ones_named() {
    let (dir, _, out) = trained();
    let file = |name: &str| text(&dir.path().join(name));
    let large = image::imageops::resize(&drawn(2, 5), 160, 160, image::imageops::FilterType::Nearest);
    large.save(file("large.png")).unwrap();
    large.save(file("large.jpg")).unwrap();
    image::DynamicImage::from(drawn(2, 5)).into_rgba16().save(file("deep.png")).unwrap();
    fs::write(file("text.png"), "no picture").unwrap();
    fs::write(file("empty.png"), "").unwrap();
    let half = fs::read(file("large.jpg")).unwrap();
    fs::write(file("half.jpg"), &half[..half.len() / 2]).unwrap();
    let run = text(&out);

    let said = kiln(["predict", &run, &file("large.png"), &file("large.jpg"), &file("deep.png")]).ok().out;
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.len() == 3 && lines.iter().all(|l| l.split(": ").nth(1).unwrap().starts_with("frame ")), "{said}");
    assert_eq!(lines[0].matches('%').count(), 3, "{said}");

    let bad = ["missing.png", "text.png", "empty.png", "half.jpg"].map(file);
    for path in &bad {
        kiln(["predict", &run, path]).fails(&["error: ", path.as_str()]);
    }
    kiln(["predict", &run, &file("")]).fails(&["Is a directory"]);
    let ran = kiln(["predict", &run, &bad[0], &file("large.png"), &bad[3]]);
    ran.fails(&["missing.png: No such file", "half.jpg: not a readable picture"]);
    assert!(ran.out.lines().count() == 1 && ran.out.contains("large.png: frame"), "the others are predicted: {ran:#?}");
    let ran = kiln(["predict", &run, &bad[0], &file("large.png"), "--json", "--top", "1"]);
    ran.fails(&["missing.png"]);
    let seen: Value = serde_json::from_str(&ran.out).unwrap();
    assert!(seen["pictures"][0]["error"].as_str().unwrap().contains("No such file"), "{seen}");
    assert_eq!(seen["pictures"][1]["guesses"].as_array().unwrap().len(), 1);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (dir, data, out) = trained();
    let run = text(&out);
    let hydra = dir.path().join("hydra");
    train(&hydra, "--steps 1").ok();
    let hydra = text(&hydra);
    let picture = text(&data.join("val/row/1000.png"));

    kiln(["predict", &hydra, &picture]).fails(&["hydra", "does not classify pictures", "vision_bdh"]);
    kiln(["generate", &run]).fails(&["vision_bdh", "does not write text", "kiln predict"]);
    kiln(["predict", &run]).fails(&["PICTURES"]);
    kiln(["predict", &run, &picture, "--top", "0"]).fails(&["--top", "0"]);
    kiln(["predict", "/nowhere/at/all", &picture]).fails(&["/nowhere/at/all"]);
    kiln(["eval", &hydra, "--picture", "x.png"]).fails(&["--picture", "hydra"]);
    kiln(["eval", &run, "--picture", "/nowhere/at/all.png"]).fails(&["/nowhere/at/all.png"]);
    let hydra_epochs = dir.path().join("epochs");
    train(&hydra_epochs, "--steps 1 --set eval_every=0").fails(&["train.eval_every = 0", "no epochs"]);
    assert!(!hydra_epochs.exists());

    let fewer = dir.path().join("fewer");
    copy(&data, &fewer);
    for split in ["train", "val"] {
        fs::remove_dir_all(fewer.join(split).join("row")).unwrap();
    }
    let never = dir.path().join("never");
    vision(&fewer, &never, "--steps 1").fails(&["3 classes", "model.classes = 4", "--set model.classes=3"]);
    assert!(!never.exists());
    let large = "--steps 1 --set patch=1 --set dim=4096 --set multiplier=4096 --set heads=1";
    vision(&data, &never, large).fails(&["tokens x 16777216 neurons", "raise model.patch"]);
    kiln(["eval", &run, "--data", &text(&fewer)]).fails(&["3 classes", "model.classes = 4"]);
    let renamed = dir.path().join("renamed");
    copy(&data, &renamed);
    for split in ["train", "val"] {
        fs::rename(renamed.join(split).join("row"), renamed.join(split).join("rows")).unwrap();
    }
    kiln(["eval", &run, "--data", &text(&renamed)]).fails(&["\"row\"", "\"rows\""]);

    // Another set of the same classes is evaluated, and its picture drawn where it is asked for, nowhere else.
    let before = names(&out);
    let other = dir.path().join("other");
    copy(&data, &other);
    fs::remove_file(other.join("val/row/1000.png")).unwrap();
    let said = kiln(["eval", &run, "--data", &text(&other)]).ok();
    assert!(said.out.contains("row           10") && said.err.is_empty(), "{said:#?}");
    assert_eq!(names(&out), before);
    let drawn = dir.path().join("other.png");
    kiln(["eval", &run, "--data", &text(&other), "--picture", &text(&drawn)]).ok();
    image::open(&drawn).unwrap();

    // Changed data is said.
    fs::remove_file(data.join("train/row/3.png")).unwrap();
    let ran = kiln(["eval", &run]).ok();
    assert!(ran.err.contains("the data has changed"), "{ran:#?}");
    resume(&out, "--steps 61").fails(&["is not that of checkpoint"]);
    assert!(half_written(dir.path()).is_empty());
}

/// The beginning of what LOG.md shows to the end; chance is 10%, with a standard deviation of 0.7%.
#[test]
fn tiny_begins_to_learn_drawn_pictures() {
    let dir = tempdir().unwrap();
    kiln(["train", "vision_bdh", "--steps", "400", "--out", &text(dir.path())]).ok();
    let last = by_step(dir.path()).into_values().next_back().unwrap();
    assert!(last["val_accuracy"].as_f64().unwrap() > 0.3, "{last}");
}

/// Evaluation sees pictures as they are, and drops nothing: whatever is drawn, it answers as a model without dropout does.
#[test]
fn evaluation_draws_nothing() {
    let dir = tempdir().unwrap();
    let path = format!("data.path={}", write_set(&dir.path().join("data")).display());
    let answers = |dropout: &str, program: &str| {
        let mut c = recipe::preset(recipe::find("vision_bdh").unwrap(), None).unwrap();
        let sizes = ["image=16", "patch=4", "classes=4", "dim=16", "heads=2", "multiplier=4", "loops=2", "batch=16", "least_area=0.3"];
        sizes.iter().chain([&dropout, &path.as_str()]).for_each(|s| c.set(s).unwrap());
        let mut task = recipe::find("vision_bdh").unwrap().task(&c).unwrap();
        let mut s = run::load(&*task, &c, &Device::cpu(Cpu::new(1))).unwrap();
        task.begin(0).unwrap();
        let (ids, targets): (Vec<i32>, Vec<i32>) = ((0..16).collect(), (0..16).map(|i| i % 4).collect());
        let mut run = |rng: [i32; 4]| {
            let numbers = [("weight", Data::F32(&[0.0625])), ("rate", Data::F32(&[0.0]))];
            let feeds = [("ids", Data::I32(&ids)), ("targets", Data::I32(&targets)), ("rng", Data::I32(&rng)), numbers[0], numbers[1]];
            s.run(program, &feeds).unwrap();
            s.read(program, if program == "eval" { "logits" } else { "report" }).unwrap()
        };
        [run([1, 2, 3, 4]), run([5, 6, 7, 8])]
    };
    let [first, second] = answers("dropout=0.5", "eval");
    assert_eq!(first, second);
    assert_eq!(first, answers("dropout=0.0", "eval")[0]);
    let [first, second] = answers("dropout=0.5", "train");
    assert_ne!(first[0], second[0], "training does");
}
