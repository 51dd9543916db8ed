use super::*;

section! {
    /// A model.
    struct Model {
        /// Its width.
        dim: usize = 64, in 1..=1024;
        /// Shares of the tokens.
        capacity: Vec<f64> = vec![1.0, 0.5], in 1e-38..=1.0;
        /// What it tells apart.
        classes: usize = 0, in 1..=10, [data];
    }
}

fn sections() -> Vec<Keys> {
    vec![Model::keys("model"), DataConfig::keys("data"), TrainConfig::keys("train")]
}

fn base() -> Config {
    Config::preset("r", "p", sections(), "[train]\nsteps = 5\n")
}

#[test]
fn keys_and_types_are_compared_with_the_defaults() {
    let error = |s: &str| base().set(s).unwrap_err().to_string();
    assert!(error("model.dmi=3").starts_with("there is no key 'model.dmi'; did you mean 'model.dim'? (`"));
    assert!(error("learning_rat=3").starts_with("there is no key 'learning_rat'; did you mean 'learning_rate'? (`"));
    assert!(error("learning_rat=3").ends_with(" config r` lists them all)"));
    assert_eq!(error("dim=large"), "'model.dim' wants a whole number, not a string (\"large\")");
    assert_eq!(error("dim=1e308"), "'model.dim' wants a whole number, not a number (1e308)");
    assert_eq!(error("dim=-1"), "'model.dim' wants a whole number that is not negative, not -1");
    assert_eq!(error("modle.dim=3"), "there is no section 'modle'; did you mean 'model'? (known: data, model, train, passes)");
    assert_eq!(error("zzzzzzzzzzzz.dim=3"), "there is no section 'zzzzzzzzzzzz' (known: data, model, train, passes)");
    assert_eq!(error("dim"), "--set wants key=value, not 'dim'");
    assert!(error("capacity=[1.0, \"a\"]").contains("'model.capacity' wants a number"));
    assert!(error("passes.fuse-pointwise=on").contains("not off, auto or require"));
}

#[test]
fn names_of_other_trainers_are_answered_with_the_keys_here() {
    let meant = |key: &str| {
        let said = base().set(&format!("{key}=1")).unwrap_err().to_string();
        said.split_once("did you mean '").map(|(_, rest)| rest.split_once('\'').unwrap().0.to_string())
    };
    let cases = [
        ("lr", "learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("model.lr", "train.learning_rate"),
        ("model.steps", "train.steps"),
        ("batch_size", "batch"),
        ("per_device_train_batch_size", "batch"),
        ("gradient_accumulation_steps", "accumulate"),
        ("warmup_steps", "warmup"),
        ("Weight-Decay", "weight_decay"),
        ("max_grad_norm", "clip"),
        ("logging_steps", "log_every"),
        ("output_dir", "--out"),
        ("amp", "--pass bf16=auto"),
        ("bf16", "--pass bf16=auto"),
        ("gradient_checkpointing", "--pass recompute=auto"),
        ("accum", "accumulate"),
    ];
    for (theirs, ours) in cases {
        assert_eq!(meant(theirs).as_deref(), Some(ours), "{theirs}");
    }
    base().set("epochs=2").unwrap();
    assert_eq!(meant("zzzzzzzz"), None);
    // Every name that is answered is a key of some recipe, or a flag.
    let keys: Vec<String> = crate::recipes::RECIPES.iter().flat_map(|r| r.sections()).flat_map(|s| s.keys).map(|k| k.name.into()).collect();
    for (theirs, ours) in aliases::ELSEWHERE {
        let known = |name: &str| name.starts_with("--") || name == "seed" || keys.iter().any(|k| k == name);
        assert!(ours.iter().any(|name| known(name)), "{theirs}");
    }
}

#[test]
fn values_are_set() {
    let mut c = base();
    for s in ["dim=128", "learning_rate=1", "capacity=[1, 0.25, 0.125]", "path=a folder", "passes.recompute=auto,what=blocks"] {
        c.set(s).unwrap();
    }
    let d: Vec<String> = base().differences(&c).into_iter().map(|d| format!("{}: {} -> {}", d.0, d.1, d.2)).collect();
    assert_eq!(d.len(), 5, "{d:?}");
    assert!(c.to_toml().contains("dim = 128") && c.to_toml().contains("learning_rate = 1.0"));
    let mut again = base();
    again.overlay(c.to_toml().parse().unwrap()).unwrap();
    assert_eq!(again, c);
    assert_eq!(Config::from_json(&c.to_json()).unwrap(), c);
}

#[test]
fn values_are_checked_by_the_range_of_their_key() {
    let error = |s: &str| {
        let mut c = base();
        c.set(s).unwrap();
        (c.section::<Model>("model").map(|_| ()), c.section::<TrainConfig>("train").map(|_| ()))
    };
    let model = |s: &str| error(s).0.unwrap_err().to_string();
    assert_eq!(model("dim=0"), "model.dim = 0: from 1 to 1024");
    assert_eq!(model("dim=1025"), "model.dim = 1025: from 1 to 1024");
    assert_eq!(model("capacity=[1.0, 1.5]"), "model.capacity = [1.0, 1.5]: from 1e-38 to 1.0");
    assert_eq!(model("capacity=[1e-50]"), "model.capacity = [1e-50]: 0, or from 1e-38 to 1e30 in size (numbers are f32)");
    let train = |s: &str| error(s).1.unwrap_err().to_string();
    assert_eq!(train("beta1=1.0"), "train.beta1 = 1.0: from 0.0, below 1.0");
    assert_eq!(train("schedule=linear"), "train.schedule = \"linear\": cosine or wsd or constant");
    assert!(error("dim=1024").0.is_ok() && error("train.eps=1e-38").1.is_ok());
    assert!(Model { dim: 0, ..Model::default() }.in_range("model").is_err(), "a struct is checked like a file");
}

#[test]
fn sizes_left_open_are_taken_from_the_data() {
    let mut c = base();
    assert_eq!(c.section::<Model>("model").unwrap().classes, 0);
    assert!(c.section::<Model>("model").unwrap().in_range("model").unwrap_err().to_string().contains("model.classes = 0: from 1 to 10"));
    c.size("model.classes", |_| Ok::<_, ConfigError>(7)).unwrap();
    c.size("model.classes", |_| Err(ConfigError::Invalid("asked again".into()))).unwrap();
    c.section::<Model>("model").unwrap().in_range("model").unwrap();
    assert_eq!(c.section::<Model>("model").unwrap().classes, 7);
}

#[test]
fn settings_of_an_earlier_run_are_filled_in() {
    let old = "recipe = 'r'\npreset = 'p'\nseed = 3\n[model]\ndim = 8\n[train]\nsteps = 9\n[passes]\nrecompute = 'auto'\n";
    let (c, filled) = Config::of_run(sections(), old.parse().unwrap()).unwrap();
    let model: Model = c.section("model").unwrap();
    assert_eq!((c.text("preset"), c.seed(), model.dim, model.capacity), ("p", 3, 8, vec![1.0, 0.5]));
    assert!(filled.contains(&"model.capacity = [1.0, 0.5]".to_string()) && filled.contains(&"train.batch = 16".to_string()), "{filled:?}");
    assert!(!filled.iter().any(|key| key.starts_with("model.dim") || key.starts_with("seed") || key.starts_with("passes")), "{filled:?}");
    let (again, filled) = Config::of_run(sections(), c.to_toml().parse().unwrap()).unwrap();
    assert_eq!((again, filled), (c, vec![]));
    let unknown = Config::of_run(sections(), "[model]\nwidth = 8\n".parse().unwrap()).unwrap_err().to_string();
    assert!(unknown.contains("there is no key 'model.width'"), "{unknown}");
}

/// One path is written as a text, so that configs of before are read, and several as a list; both become absolute, patterns and weights as they are.
#[test]
fn a_key_may_name_several_paths() {
    let mut config = base();
    let path = |config: &Config| config.value("data", "path").cloned().unwrap();
    config.set("data.path=a").unwrap();
    assert_eq!(path(&config), "a".into());
    config.set("data.path=[\"more/*.jsonl:0.5\", \"/b/../c:1\"]").unwrap();
    config.absolute_paths().unwrap();
    let here = std::env::current_dir().unwrap().display().to_string();
    assert_eq!(path(&config), Value::Array(vec![format!("{here}/more/*.jsonl:0.5").into(), path(&config)[1].clone()]));
    assert_eq!(config.data_path().unwrap().to_string(), format!("{here}/more/*.jsonl:0.5, {}", path(&config)[1].as_str().unwrap()));
    let (read, filled) = Config::of_run(sections(), config.to_toml().parse().unwrap()).unwrap();
    assert_eq!((path(&read), filled), (path(&config), vec![]));
    assert!(config.section::<DataConfig>("data").unwrap().path.find().is_err(), "no file matches");
    for wrong in ["data.path=3", "data.path=[1]", "data.path=[\"\"]"] {
        let error = config.set(wrong).unwrap_err().to_string();
        assert!(error.contains("'data.path' wants a path or a list of paths, not"), "{error}");
    }
    config.set("data.path=").unwrap();
    assert_eq!(config.data_path(), None);
}
