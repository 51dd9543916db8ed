//! Optimizer states in 8 bits or bf16: what they take, resumed runs, conversions between checkpoints, and what the model learns with them.

use super::common::{checkpoint, kiln, records, resume, same_bytes, train};
use engine::ops::adamw8::Map;
use engine::{Cpu, Device, Meta};
use kiln::checkpoint::{self as checkpoints, Loaded};
use kiln::config::Config;
use kiln::{recipe, run};
use std::path::Path;

/// Bytes of states of the training step beside the weights.
fn optimizer_bytes(sets: &str) -> u64 {
    let args = ["plan", "decoder", "--json"].into_iter().chain(sets.split_whitespace());
    let plan: serde_json::Value = serde_json::from_str(&kiln(args).ok().out).unwrap();
    let [train, weights] = [0, 1].map(|program: usize| plan[program]["state"].as_u64().unwrap());
    train - weights
}

#[test]
fn states_of_a_decoder_take_at_most_27_percent() {
    for (more, pass, most) in [
        ("", "auto", 0.27),
        ("--preset gpt2-124m --for-sm 90", "auto", 0.256),
        ("--set optimizer=muon", "auto", 0.27),
        // Momentum is half of what AdamW keeps, and most of the weights have it.
        ("--set optimizer=muon", "auto,momentum=bf16", 0.51),
    ] {
        let [off, on] = ["off", pass].map(|value| optimizer_bytes(&format!("{more} --pass adam8bit={value}")));
        let share = on as f64 / off as f64;
        assert!(share <= most && share > most - 0.06, "{more} adam8bit={pass}: {share}");
    }
}

#[test]
fn a_resumed_run_with_8_bit_states_is_the_run_that_never_stopped() {
    let dir = tempfile::tempdir().unwrap();
    for (name, more) in
        [("adamw", ""), ("muon", "--set optimizer=muon"), ("bf16", "--set optimizer=muon --pass adam8bit=auto,least=64,momentum=bf16")]
    {
        let [whole, parts] = ["whole", "parts"].map(|p| dir.path().join(format!("{name}-{p}")));
        let set = format!("--set save_every=1 --set keep=0 --pass adam8bit=auto,least=64 {more}");
        train(&whole, &format!("--steps 5 {set}")).ok();
        train(&parts, &format!("--steps 2 {set}")).ok();
        resume(&parts, "--steps 5").ok();
        (3..=5).for_each(|step| same_bytes(&checkpoint(&whole, step), &checkpoint(&parts, step)));
        let state = states(&checkpoint(&whole, 5));
        let bytes = state.names().iter().filter(|n| Map::of_bytes(n).is_some()).count();
        assert!(bytes > 10 || (name == "bf16" && bytes > 2), "{name}: {:?}", state.names());
    }
}

fn states(folder: &Path) -> Loaded {
    checkpoints::open(folder).unwrap().file("state.safetensors").unwrap()
}

fn floats(file: &Loaded, name: &str) -> (Vec<usize>, Vec<f32>) {
    let (dtype, shape, bytes) = file.get(name).unwrap_or_else(|| panic!("there is no {name}"));
    assert_eq!(dtype, "F32", "{name}");
    (shape, bytemuck::pod_collect_to_vec(bytes))
}

#[test]
fn states_are_converted_both_ways_when_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a");
    train(&out, "--steps 2 --set optimizer=muon").ok();
    let narrow = "--pass adam8bit=auto,least=64";
    resume(&out, &format!("--steps 3 {narrow}")).fails(&["adam.m/", "in f32", "in 8 bits", "--convert-states", "adam8bit"]);
    assert!(!checkpoint(&out, 3).exists());
    let said = resume(&out, &format!("--steps 3 {narrow} --convert-states")).ok().out;
    assert!(said.contains("converted") && said.contains("states from f32 to 8 bits"), "{said}");
    // It goes on as it is, without being asked again; and back.
    let said = resume(&out, "--steps 4 --convert-states").ok().out;
    assert!(said.contains("every state has the form"), "{said}");
    resume(&out, "--steps 5 --pass adam8bit=off").fails(&["in 8 bits", "in f32", "--convert-states"]);
    let said = resume(&out, "--steps 5 --pass adam8bit=off --convert-states").ok().out;
    assert!(said.contains("states from 8 bits to f32"), "{said}");
    assert!(states(&checkpoint(&out, 5)).names().iter().all(|n| Map::of_bytes(n).is_none() && !Map::is_absmax(n)));
    let half = "--pass adam8bit=auto,moments=f32,momentum=bf16,least=64";
    resume(&out, &format!("--steps 6 {half}")).fails(&["muon.m/", "in f32", "in bf16", "--convert-states"]);
    let said = resume(&out, &format!("--steps 6 {half} --convert-states")).ok().out;
    assert!(said.contains("states from f32 to bf16"), "{said}");
    let said = resume(&out, &format!("--steps 7 {narrow} --convert-states")).ok().out;
    assert!(said.contains("from bf16 to 8 bits") && said.contains("from f32 to 8 bits"), "{said}");
    train(&dir.path().join("b"), "--steps 1 --convert-states").fails(&["--convert-states", "--resume"]);
}

/// A run's config with a pass set, and its programs with the state of a checkpoint, converted.
fn restored(folder: &Path, pass: &str) -> kiln::recipe::Session {
    let found = checkpoints::open(folder).unwrap();
    let recipe = recipe::find("hydra").unwrap();
    let mut config: Config = recipe::preset(recipe, None).unwrap().of_checkpoint(&found.meta["config"]).unwrap().0;
    config.set_pass_argument(&format!("adam8bit={pass}")).unwrap();
    let mut s = run::load(&*recipe.task(&config).unwrap(), &config, &Device::cpu(Cpu::new(1))).unwrap();
    run::restore(&mut s, &found, true).unwrap();
    s
}

#[test]
fn converted_states_are_the_engines_quantization_and_come_back_within_its_rounding() {
    let dir = tempfile::tempdir().unwrap();
    let [wide, narrow] = ["wide", "narrow"].map(|name| dir.path().join(name));
    train(&wide, "--steps 3").ok();
    train(&narrow, "--steps 3 --pass adam8bit=auto,least=64").ok();
    let (file, s) = (states(&checkpoint(&wide, 3)), restored(&checkpoint(&wide, 3), "auto,least=64"));
    let of = |name: &str| s.store.get(name).unwrap_or_else(|| panic!("there is no {name}")).bytes().unwrap().into_owned();
    let mut seen = 0;
    for (name, map) in file.names().iter().filter_map(|n| Some((n.as_str(), map_of(n)?))) {
        let (shape, numbers) = floats(&file, name);
        let [of_bytes, of_most] = map.names(name);
        if Meta::f32(&shape).elements() < 64 {
            assert_eq!(of(name), bytemuck::cast_slice::<f32, u8>(&numbers), "{name} is small");
            continue;
        }
        let (bytes, most) = map.quantized(&numbers);
        assert_eq!((of(&of_bytes), of(&of_most)), (bytes.clone(), bytemuck::cast_slice(&most).to_vec()), "{name}");
        // Half of the widest gap of the map, of what is largest in its block.
        let gap = if map == Map::Signed { 0.9 / 64.0 } else { 0.9 / 128.0 };
        for (i, (a, b)) in numbers.iter().zip(map.dequantized(&bytes, &most)).enumerate() {
            assert!((a - b).abs() <= 0.501 * gap * most[i / 256], "{name}: {a} became {b}, of {}", most[i / 256]);
        }
        seen += 1;
    }
    assert!(seen > 10, "{seen}");
    let (file, s) = (states(&checkpoint(&narrow, 3)), restored(&checkpoint(&narrow, 3), "off"));
    let of = |name: &str| s.store.get(name).unwrap().f32().unwrap();
    for (name, (map, base)) in file.names().iter().filter_map(|n| Some((n.as_str(), Map::of_bytes(n)?))) {
        let most = floats(&file, &map.names(base)[1]).1;
        assert_eq!(of(base), map.dequantized(file.get(name).unwrap().2, &most), "{base}");
    }
}

/// The map of a state's name in f32.
fn map_of(name: &str) -> Option<Map> {
    let of = |prefix: &str, map: Map| name.starts_with(prefix).then_some(map);
    of("adam.m/", Map::Signed).or_else(|| of("adam.v/", Map::Unsigned))
}

/// A model that learns, by either optimizer, ends within a percent of the loss that it has with f32 states. At a rate at which a rate of 1% more
/// changes the loss by less than a percent, too: at three times this rate that changes it by up to a third.
#[test]
fn what_is_learnt_with_8_bit_states_is_within_a_percent() {
    let dir = tempfile::tempdir().unwrap();
    for (optimizer, steps, passes) in [("adamw", 150, &["auto"][..]), ("muon", 60, &["auto", "auto,momentum=bf16"])] {
        let loss = |pass: &str| {
            let out = dir.path().join(format!("{optimizer}-{pass}"));
            let small = "--preset tiny --set dim=64 --set hidden=160 --set layers=2 --set heads=2 --set kv_heads=1 --set head_dim=32 --set seq=32 --set batch=8";
            let more = format!(
                "--steps {steps} --set eval_every={steps} --set learning_rate=0.001 --set eval_batches=8 --set optimizer={optimizer} --pass adam8bit={pass} \
                 --threads 2 --out {}",
                out.display()
            );
            kiln(["train", "decoder"].into_iter().chain(small.split_whitespace()).chain(more.split_whitespace())).ok();
            records(&out, "val").last().unwrap()["val_loss"].as_f64().unwrap()
        };
        let wide = loss("off");
        for pass in passes {
            let narrow = loss(pass);
            println!("{optimizer}, adam8bit={pass}: {narrow} instead of {wide}");
            assert!(narrow != wide && (narrow / wide - 1.0).abs() < 0.01, "{optimizer}, adam8bit={pass}: {narrow} instead of {wide}");
        }
    }
}
