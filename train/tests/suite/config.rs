//! Keys, presets and where values come from: defaults, the data, an earlier run.

use crate::common::*;
use kiln::checkpoint::Tensor;
use kiln::config::Config;
use kiln::recipe;
use kiln::recipes::RECIPES;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

#[test]
fn every_key_says_what_it_means_and_defaults_are_in_range() {
    for recipe in RECIPES {
        let defaults = Config::new(recipe.name(), "", recipe.sections());
        let mut seen = 0;
        for (section, key) in defaults.keys() {
            let name = format!("{} {section}.{}", recipe.name(), key.name);
            assert!(key.about.ends_with('.') && key.about.len() > 10 && !key.about.contains('|'), "{name}: {}", key.about);
            assert!(key.check(section, &key.default, true).is_ok(), "{name} = {}", key.default);
            seen += 1;
        }
        assert!(seen > 5, "{}: {seen} keys", recipe.name());
    }
}

#[test]
fn presets_hold_what_differs_from_the_defaults() {
    for recipe in RECIPES {
        let defaults = Config::new(recipe.name(), "", recipe.sections());
        for (name, text) in recipe.presets() {
            assert!(text.starts_with("# "), "{} {name} does not say what it is", recipe.name());
            let table: toml::Table = text.parse().unwrap();
            for (section, keys) in table.iter().filter(|(section, _)| *section != "passes") {
                for (key, value) in keys.as_table().unwrap() {
                    assert_ne!(defaults.value(section, key), Some(value), "{} {name}: {section}.{key} is the default", recipe.name());
                }
            }
            let config = recipe::preset(*recipe, Some(name)).unwrap();
            let changed = |c: &Config| defaults.differences(c).into_iter().filter(|d| d.0 != "preset").count();
            let written: usize = table.values().map(|keys| keys.as_table().unwrap().len()).sum();
            assert_eq!(changed(&config), written, "{} {name}", recipe.name());
        }
    }
}

#[test]
fn recipes_and_keys_are_listed() {
    let listed = kiln(["recipes"]).ok().out;
    for recipe in RECIPES {
        assert!(listed.contains(&format!("{}: {}", recipe.name(), recipe.about())), "{listed}");
        for (name, _) in recipe.presets() {
            assert!(listed.contains(&format!("--preset {name}")), "{listed}");
        }
        let keys = kiln(["config", recipe.name()]).ok().out;
        let all = Config::new(recipe.name(), "", recipe.sections());
        for (section, key) in all.keys() {
            let line = format!("{section}.{} = {}\n    {}", key.name, key.default_text(), key.type_and_range());
            assert!(keys.contains(&line) && keys.contains(key.about), "{line} in {keys}");
        }
        assert!(keys.contains("seed = 0\n"), "{keys}");
    }
    let one = kiln(["config", "hydra", "dim"]).ok().out;
    assert_eq!(one.trim(), "model.dim = 128\n    whole number, from 1 to 1048576\n    Width of the residual stream.");
    let preset = kiln(["config", "hydra", "model.dim", "--preset", "small"]).ok().out;
    assert!(preset.contains("model.dim = 320 (default 128)"), "{preset}");
    let section = kiln(["config", "lior", "train"]).ok().out;
    assert!(section.contains("train.steps = ") && !section.contains("beta1") && !section.contains("model."), "{section}");
    let json: serde_json::Value = serde_json::from_str(&kiln(["config", "vision_bdh", "classes", "--json"]).ok().out).unwrap();
    assert_eq!((&json[0]["key"], &json[0]["from_data"]), (&"model.classes".into(), &true.into()));

    kiln(["config", "hidra"]).fails(&["no recipe 'hidra'", "did you mean 'hydra'", "vision_bdh", "polychromic"]);
    kiln(["config", "hydra", "dmi"]).fails(&["no key 'dmi'", "did you mean 'dim'", "kiln config hydra"]);
    kiln(["config", "hydra", "model.dmi"]).fails(&["no key 'model.dmi'", "did you mean 'model.dim'"]);
    kiln(["config", "hydra", "--preset", "smal"]).fails(&["no preset 'smal'", "did you mean 'small'", "100m"]);
    kiln(["config"]).fails(&["RECIPE"]);
}

type Read = (String, String, Vec<usize>, Vec<u8>);

/// Writes a checkpoint again as an earlier version would have.
fn make_older(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let old = kiln::checkpoint::open(path).unwrap();
    let read = |file: &str| -> Vec<Read> {
        let file = old.file(file).unwrap();
        let one = |name: String| {
            let (dtype, shape, bytes) = file.get(&name).unwrap();
            (name, dtype, shape, bytes.to_vec())
        };
        file.names().into_iter().map(one).collect()
    };
    fn tensors(all: &[Read]) -> Vec<Tensor<'_>> {
        all.iter().map(|(name, dtype, shape, bytes)| Tensor { name, dtype, shape, bytes }).collect()
    }
    let [model, state] = ["model.safetensors", "state.safetensors"].map(read);
    let mut meta = old.meta.clone();
    change(&mut meta);
    let files = [("model.safetensors", tensors(&model)), ("state.safetensors", tensors(&state))];
    kiln::checkpoint::save(path.parent().unwrap(), old.step, &files, &[], &meta, 0.into()).unwrap();
}

/// It did not write down how long its schedule was: more steps than the horizon stretched it.
#[test]
fn an_older_checkpoint_keeps_its_schedule() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    for (horizon, length) in [(2, 4), (9, 9)] {
        fs::remove_dir_all(&run).ok();
        train(&run, &format!("--steps 4 --set horizon={horizon}")).ok();
        make_older(&checkpoint(&run, 4), |meta| drop(meta.as_object_mut().unwrap().remove("schedule_steps").unwrap()));
        let said = resume(&run, "--steps 5").ok().out;
        assert!(said.contains(&format!("steps 4 to 5 of a cosine schedule over {length};")), "{said}");
        // From here on it is written down.
        let said = resume(&run, "--steps 6").ok().out;
        assert!(said.contains(&format!("steps 5 to 6 of a cosine schedule over {length};")), "{said}");
    }
}

/// What kiln wrote before some keys were there: the run goes on, and says what they are.
#[test]
fn the_config_of_an_older_run_is_filled_in() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2 --set horizon=4").ok();
    let path = run.join("config.toml");
    let now = fs::read_to_string(&path).unwrap();
    let without = |keys: &[&str]| -> String {
        now.lines().filter(|line| !keys.iter().any(|key| line.starts_with(&format!("{key} =")))).map(|line| format!("{line}\n")).collect()
    };
    fs::write(&path, without(&["router_weight", "decay_share"])).unwrap();
    make_older(&checkpoint(&run, 2), |meta| {
        meta["config"]["model"].as_object_mut().unwrap().remove("router_weight").unwrap();
        meta["config"]["train"].as_object_mut().unwrap().remove("decay_share").unwrap();
    });
    let said = resume(&run, "--steps 3").ok().out;
    assert!(said.contains("which have their defaults: model.router_weight = 0.01, train.decay_share = 0.2"), "{said}");
    assert!(said.contains("resumed from"), "{said}");
    assert_eq!(fs::read_to_string(&path).unwrap(), now.replace("steps = 2", "steps = 3"), "the run has every key again");
    let said = resume(&run, "--steps 4").ok().out;
    assert!(!said.contains("their defaults"), "{said}");

    let known = fs::read_to_string(&path).unwrap();
    fs::write(&path, known.replace("router_weight", "router_wait")).unwrap();
    resume(&run, "--steps 5").fails(&["config.toml", "no key 'model.router_wait'", "did you mean 'model.router_weight'"]);
    // A file without its last line was cut: keys that it lacks are not older than it.
    fs::write(&path, known.split_once("[train]").unwrap().0).unwrap();
    let cut = resume(&run, "--steps 5").ok();
    assert!(cut.err.contains("has lost its keys") && cut.err.contains("settings are those of"), "{cut:?}");
}

#[test]
fn sizes_are_taken_from_the_data() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let sized = |name: &str, sets: &[String]| -> Result<Config, String> {
        let recipe = recipe::find(name).unwrap();
        let mut c = recipe::preset(recipe, None).unwrap();
        sets.iter().for_each(|s| c.set(s).unwrap());
        let sized = recipe.sized(&c).map_err(|e| e.to_string())?;
        recipe.task(&c).map_err(|e| e.to_string())?;
        Ok(sized)
    };
    let size = |c: &Config, section: &str, key: &str| c.value(section, key).unwrap().as_integer().unwrap();
    let data = |path: &Path| format!("data.path={}", path.display());

    let words = word_data(&at("words"), &["to", "be", "or"], at_white_space());
    for (recipe, small) in [("hydra", "seq=8"), ("lior", "seq=16")] {
        assert_eq!(size(&sized(recipe, &[small.into()]).unwrap(), "model", "vocab"), 256, "bytes");
        assert_eq!(size(&sized(recipe, &[small.into(), data(&words)]).unwrap(), "model", "vocab"), 4, "three words and [unk]");
        assert_eq!(size(&sized(recipe, &[small.into(), data(&words), "vocab=9".into()]).unwrap(), "model", "vocab"), 9, "room is left");
        let wrong = sized(recipe, &[small.into(), data(&words), "vocab=3".into()]).unwrap_err();
        assert!(wrong.contains("4 tokens, but model.vocab = 3"), "{wrong}");
    }

    for (split, class) in [("train", "a"), ("train", "b"), ("train", "c"), ("val", "a"), ("val", "b"), ("val", "c")] {
        let folder = at("pictures").join(split).join(class);
        fs::create_dir_all(&folder).unwrap();
        image::RgbImage::from_pixel(40, 40, image::Rgb([9, 9, 9])).save(folder.join("one.png")).unwrap();
    }
    let pictures = data(&at("pictures"));
    let c = sized("vision_bdh", std::slice::from_ref(&pictures)).unwrap();
    assert_eq!((size(&c, "model", "classes"), size(&c, "model", "image")), (3, 40));
    let wrong = sized("vision_bdh", &[pictures, "classes=4".into()]).unwrap_err();
    assert!(wrong.contains("3 classes, but model.classes = 4"), "{wrong}");
    let missing = sized("vision_bdh", &["data.path=/nowhere/at/all".into()]).unwrap_err();
    assert!(missing.contains("/nowhere/at/all"), "{missing}");

    let c = sized("hrm", &["train_puzzles=2".into(), "test_puzzles=2".into()]).unwrap();
    assert_eq!((size(&c, "data", "side"), size(&c, "model", "vocab"), size(&c, "model", "seq")), (4, 6, 17));
    let csv = at("puzzles");
    fs::create_dir(&csv).unwrap();
    let solved = "1234341221434321";
    for name in ["train.csv", "test.csv"] {
        fs::write(csv.join(name), format!("puzzle,solution\n{}.,{solved}\n", &solved[..15])).unwrap();
    }
    let c = sized("hrm", &[data(&csv), "side=0".into(), "prefix=2".into()]).unwrap();
    assert_eq!((size(&c, "data", "side"), size(&c, "model", "seq")), (4, 18));
    let wrong = sized("hrm", &[data(&csv), "side=9".into()]).unwrap_err();
    assert!(wrong.contains("sudoku-4x4, but data.side = 9"), "{wrong}");
    let wrong = sized("hrm", &["seq=16".into()]).unwrap_err();
    assert!(wrong.contains("model.seq = 16"), "{wrong}");
}

/// A checkpoint knows the sizes that its data had: it needs no data to write.
#[test]
fn a_run_writes_down_the_sizes_of_its_data() {
    let dir = tempdir().unwrap();
    let words = word_data(&dir.path().join("words"), &["to", "be", "or"], at_white_space());
    let run = dir.path().join("run");
    train(&run, &format!("--steps 1 --set seq=8 --data {}", words.display())).ok();
    let config: toml::Table = fs::read_to_string(run.join("config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["model"]["vocab"].as_integer(), Some(4));
    fs::remove_dir_all(&words).unwrap();
    kiln(["generate", &text(&run), "--prompt", "to be", "--max-tokens", "2"]).ok();
}

/// The value of a size that recipe and data decide.
#[track_caller]
fn sized(recipe: &str, key: &str, sets: &[&str]) -> i64 {
    let recipe = recipe::find(recipe).unwrap();
    let mut config = recipe::preset(recipe, None).unwrap();
    sets.iter().for_each(|s| config.set(s).unwrap());
    recipe.sized(&config).unwrap().value("model", key).and_then(|v| v.as_integer()).unwrap()
}

#[test]
fn the_side_of_pictures_is_theirs_where_they_agree() {
    let dir = tempdir().unwrap();
    let folder = |name: &str, sides: [(u32, u32); 2]| {
        for (class, (width, height)) in ["a", "b"].into_iter().zip(sides) {
            let path = dir.path().join(name).join(class);
            fs::create_dir_all(&path).unwrap();
            image::RgbImage::new(width, height).save(path.join("one.png")).unwrap();
        }
        sized("vision_bdh", "image", &[&format!("data.path={}", dir.path().join(name).display())])
    };
    assert_eq!(folder("alike", [(48, 48), (48, 48)]), 48);
    assert_eq!(folder("differ", [(48, 48), (64, 64)]), 32);
    assert_eq!(folder("no-squares", [(48, 40), (48, 40)]), 32);
    assert_eq!(folder("no-patches", [(28, 28), (28, 28)]), 32, "patches of 8 pixels do not fill 28");
    assert_eq!(sized("vision_bdh", "image", &["model.image=64", &format!("data.path={}", dir.path().join("alike").display())]), 64);
}

#[test]
fn the_vocabulary_of_a_base_that_is_trained_here_is_the_tokenizers() {
    let dir = tempdir().unwrap();
    let bytes = byte_data(&dir.path().join("bytes"));
    let data = format!("data.path={}", bytes.display());
    assert_eq!(sized("polychromic", "vocab", &[]), 512, "the questions have more than 448 tokens");
    assert_eq!(sized("polychromic", "vocab", &[&data]), 512, "the base learns the questions first");
    assert_eq!(sized("polychromic", "vocab", &[&data, "model.pretrain=0"]), 256);
    assert_eq!(sized("polychromic", "vocab", &["model.vocab=700"]), 700);
}
