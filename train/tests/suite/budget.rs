//! `--memory-budget`: what it chooses fits by its plan, costs as little as it can, and leaves the numbers as they are.

use crate::common::{checkpoint, kiln, losses, same_bytes, text};
use engine::passes::Target;
use engine::program::imagined;
use engine::{Cpu, Device};
use kiln::config::Config;
use kiln::recipe::{self, Task, TrainError};
use kiln::run::{self, Fitted, Limits};
use std::fs;

/// A recipe's smallest preset; `sets` are what someone asked for.
fn config(recipe: &str, sets: &[&str]) -> Config {
    let mut c = recipe::preset(recipe::find(recipe).unwrap(), Some("tiny")).unwrap();
    sets.iter().for_each(|s| c.set(s).unwrap());
    c
}

fn task(c: &Config) -> Box<dyn Task> {
    recipe::find(c.text("recipe")).unwrap().task(c).unwrap()
}

fn fit_with(c: &Config, bytes: u64, allowed: &[&str], split: bool) -> Result<Fitted, TrainError> {
    let (mut c, allowed) = (c.clone(), allowed.iter().map(|a| a.to_string()).collect::<Vec<_>>());
    // The largest number of KiB that is not more.
    c.set(&format!("memory_budget={}KiB", bytes >> 10)).unwrap();
    let limits = Limits { target: Target::Cpu, free: None, allowed: &allowed, split };
    run::fit(recipe::find(c.text("recipe")).unwrap(), &c, &limits).map(|fitted| fitted.expect("a budget was asked for"))
}

fn fit(c: &Config, bytes: u64) -> Result<Fitted, TrainError> {
    fit_with(c, bytes, &[], true)
}

/// The planned peak as it is, and the smallest.
fn ends(c: &Config, split: bool) -> (u64, u64) {
    let whole = fit_with(c, 1 << 40, &[], split).unwrap();
    assert!(whole.changes.is_empty(), "{:?}", whole.changes);
    let Err(TrainError::Budget { smallest, .. }) = fit_with(c, 1 << 10, &[], split) else { panic!("a kilobyte is enough?") };
    (whole.peaks[0], smallest)
}

#[test]
fn from_the_whole_peak_to_the_smallest_the_plan_is_within_the_budget() {
    for (recipe, shares) in [("decoder", &[0.9, 0.4, 0.1, 0.0][..]), ("hydra", &[0.5, 0.05])] {
        let c = config(recipe, &["batch=8"]);
        let (whole, smallest) = ends(&c, true);
        assert!(2 * smallest < whole, "{recipe}: {smallest} of {whole}");
        let mut last = 0.0;
        // A KiB more than the smallest, since a budget is rounded down to one.
        for share in shares {
            let budget = smallest + 1024 + ((whole - smallest) as f64 * share) as u64;
            let found = fit(&c, budget).unwrap_or_else(|e| panic!("{recipe} in {budget}: {e}"));
            assert!(found.peaks[1] <= budget && found.peaks[0] == whole, "{recipe} in {budget}: {:?}", found.peaks);
            assert!(!found.changes.is_empty());
            assert!(found.seconds[1] >= last, "{recipe} in {budget}: {:?} is faster than with more memory", found.changes);
            last = found.seconds[1];
            let programs = run::compile_for(&*task(&found.config), &found.config.switches().unwrap(), Target::Cpu, None).unwrap();
            assert_eq!(run::planned(&programs, Target::Cpu).total() as u64, found.peaks[1], "{recipe}: what is planned is what runs");
        }
        let said = fit(&c, smallest - 1024).err().expect("less than the smallest").to_string();
        for part in ["does not fit", "the smallest plan takes", "more, with --set train.batch=", "--allow adam8bit", ", which fits"] {
            assert!(said.contains(part), "{recipe}: {said}");
        }
        // Its smallest plan has a batch of one.
        assert!(said.contains("a smaller model.seq or model") && !said.contains("a smaller train.batch"), "{recipe}: {said}");
    }
}

#[test]
fn what_is_loaded_is_what_was_planned() {
    let c = config("decoder", &["seq=32", "layers=3"]);
    let (whole, smallest) = ends(&c, true);
    for budget in [whole + 1024, (whole + smallest) / 2, smallest + 1024] {
        let found = fit(&c, budget).unwrap();
        let device = Device::cpu(Cpu::new(1));
        let s = run::load_within_budget(&*task(&found.config), &found.config, &device).unwrap();
        let peak = run::peak(&s);
        assert_eq!(peak.total() as u64, found.peaks[1]);
        let Device::Cpu(_, arena) = &device else { unreachable!() };
        assert_eq!(arena.lock().unwrap().bytes().len(), peak.activations + peak.workspace, "the arena is the plan's");
    }
}

/// Losses of a few steps, and what an evaluation finds.
fn for_gpu(c: &Config, bytes: u64) -> Fitted {
    let mut c = c.clone();
    c.set(&format!("memory_budget={}KiB", bytes >> 10)).unwrap();
    let limits = Limits { target: imagined(90), free: None, allowed: &[], split: true };
    run::fit(recipe::find(c.text("recipe")).unwrap(), &c, &limits).unwrap().expect("a budget was asked for")
}

/// On a GPU a budget has room for what CUDA takes beside the plan: 20 MiB were measured.
#[test]
fn on_a_gpu_the_plan_alone_does_not_fill_the_budget() {
    let c = config("decoder", &["batch=64"]);
    let programs = run::compile_for(&*task(&c), &c.switches().unwrap(), imagined(90), None).unwrap();
    let planned = run::planned(&programs, imagined(90)).total() as u64;
    let tight = for_gpu(&c, planned + (20 << 20));
    assert!(!tight.changes.is_empty() && tight.peaks[1] <= planned + (20 << 20), "{:?} of {planned}", tight.peaks);
    assert!(for_gpu(&c, planned + (256 << 20)).changes.is_empty());
}

/// Moving moments over the bus may cost less than computing a batch in many small parts (at 365 MiB here): with less memory a step is never estimated to be faster.
#[test]
fn on_a_gpu_less_memory_is_never_faster() {
    let c = config("decoder", &["batch=32", "seq=128", "dim=512", "layers=4", "hidden=2048", "train.eval_batches=1", "passes.bf16=auto"]);
    let mut last = 0.0;
    for mib in [375, 365, 355] {
        let found = for_gpu(&c, mib << 20);
        assert!(found.seconds[1] >= last, "{mib} MiB: {:?} is faster than with more memory", found.changes);
        last = found.seconds[1];
    }
    assert!(for_gpu(&c, 365 << 20).changes.contains(&"--pass offload=auto".to_string()));
}

fn trained(c: &Config) -> Vec<f64> {
    let mut t = task(c);
    let mut s = run::load(&*t, c, &Device::cpu(Cpu::new(1))).unwrap();
    t.begin(0).unwrap();
    let mut numbers = vec![];
    for step in 0..3 {
        t.step(&mut s, step, 1e-3).unwrap();
        numbers.push(t.report(&s).unwrap().finish().unwrap().values[0].1);
    }
    numbers.push(t.evaluate(&mut s).unwrap().values[0].1);
    numbers
}

#[test]
fn recomputing_changes_no_bit_and_micro_batches_only_round() {
    for (recipe, small) in [("decoder", &["seq=32", "batch=4", "layers=3"][..]), ("hydra", &["seq=32", "batch=4", "blocks=3"])] {
        let c = config(recipe, &[small, &["eval_batches=2"]].concat());
        let plain = trained(&c);
        // Where the batch is not split.
        let (whole, smallest) = ends(&c, false);
        for budget in [whole - (whole - smallest) / 8, smallest + (whole - smallest) / 4, smallest + 1024] {
            let found = fit_with(&c, budget, &[], false).unwrap();
            assert!(found.changes.iter().all(|c| c.starts_with("--pass recompute=auto,what=")), "{:?}", found.changes);
            assert_eq!(trained(&found.config), plain, "{recipe}: {:?}", found.changes);
        }
        // Where nothing else is recomputed.
        let c = config(recipe, &[small, &["eval_batches=2", "passes.recompute=auto"]].concat());
        let (_, smallest) = ends(&c, true);
        let found = fit(&c, smallest + 1024).unwrap();
        assert!(found.config.value("train", "batch").unwrap().as_integer() < Some(4), "{:?}", found.changes);
        for (a, b) in trained(&found.config).iter().zip(&plain) {
            assert!((a - b).abs() <= 2e-6 * b.abs(), "{recipe}: {a} instead of {b}");
        }
    }
}

#[test]
fn what_someone_asked_for_is_kept() {
    let sizes = ["batch=4", "layers=3"];
    let smallest = |sets: &[&str]| ends(&config("decoder", &[&sizes, sets].concat()), true).1;
    let chosen = |sets: &[&str]| fit(&config("decoder", &[&sizes, sets].concat()), smallest(sets) + 1024).unwrap().changes.join(" ");
    let free = chosen(&[]);
    assert!(free.contains("train.batch=1") && free.contains("train.accumulate=4") && free.contains("recompute=auto,what=blocks"), "{free}");
    let pass = chosen(&["passes.recompute=auto,what=siblings"]);
    assert!(!pass.contains("recompute") && pass.contains("train.accumulate"), "{pass}");
    let batch = chosen(&["accumulate=1"]);
    assert!(batch.contains("recompute") && !batch.contains("train."), "{batch}");
    // Both: nothing is left to choose.
    let c = config("decoder", &[&sizes[..], &["passes.recompute=off", "accumulate=2"]].concat());
    let (whole, smallest) = ends(&c, true);
    assert_eq!(whole, smallest);
    // What rounds more is switched on where it is allowed, and where that is necessary.
    let c = config("decoder", &sizes);
    let (whole, smallest) = ends(&c, true);
    assert!(fit_with(&c, whole + 1024, &["adam8bit"], true).unwrap().changes.is_empty());
    let less = fit_with(&c, smallest - 2048, &["adam8bit"], true).unwrap();
    assert_eq!(less.config.to_json()["passes"]["adam8bit"], "auto", "{:?}", less.changes);
    // Without a budget on the command line nothing is chosen: a run that goes on keeps what it has.
    let (again, _) = c.of_checkpoint(&less.config.to_json()).unwrap();
    let limits = Limits { target: Target::Cpu, free: None, allowed: &[], split: true };
    assert!(!again.text("memory_budget").is_empty() && run::fit(recipe::find("decoder").unwrap(), &again, &limits).unwrap().is_none());
}

/// bf16 saves activations and costs a copy of the weights: where little is kept of the former, the plan with it is the larger one.
#[test]
fn allowing_more_never_refuses_what_fits() {
    let c = config("decoder", &["batch=4", "seq=32"]);
    let smallest = |allowed: &[&str]| {
        let Err(TrainError::Budget { smallest, .. }) = fit_with(&c, 1 << 10, allowed, true) else { panic!("a kilobyte is enough?") };
        smallest
    };
    let (none, adam) = (smallest(&[]), smallest(&["adam8bit"]));
    assert!(adam < none);
    assert_eq!(smallest(&["bf16"]), none, "bf16 costs more than it saves here");
    assert_eq!([&["adam8bit", "bf16"], &["bf16", "adam8bit"]].map(|allowed| smallest(allowed)), [adam; 2]);
    for (allowed, budget) in [(&["bf16"][..], none), (&["bf16", "adam8bit"], adam)] {
        let found = fit_with(&c, budget + 1024, allowed, true).unwrap_or_else(|e| panic!("{allowed:?}: {e}"));
        assert!(found.peaks[1] <= budget + 1024 && !found.changes.iter().any(|c| c.contains("bf16")), "{:?}", found.changes);
    }
}

/// fp16 and bf16 exclude each other: with one on, the other is neither tried nor advised.
#[test]
fn a_run_in_fp16_is_not_offered_bf16() {
    let c = config("decoder", &["batch=4", "seq=32", "passes.fp16=auto"]);
    let (whole, smallest) = ends(&c, true);
    for allowed in [&[][..], &["bf16"]] {
        let said = fit_with(&c, 1 << 20, allowed, true).err().expect("a MiB is not enough").to_string();
        assert!(said.contains("does not fit") && said.contains("--allow adam8bit") && !said.contains("bf16"), "{said}");
    }
    let found = fit_with(&c, (whole + smallest) / 2, &["bf16"], true).unwrap();
    assert!(!found.changes.is_empty() && !found.changes.iter().any(|c| c.contains("bf16")), "{:?}", found.changes);
}

const SMALL: &str = "--set seq=32 --set batch=4 --set layers=3 --set eval_batches=1 --set horizon=20 --threads 1";

#[test]
fn a_run_keeps_what_was_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, smallest) = ends(&config("decoder", &["seq=32", "batch=4", "layers=3"]), true);
    let budget = format!("{}KiB", (smallest + (whole - smallest) / 20) >> 10);
    let [one, two] = ["one", "two"].map(|name| dir.path().join(name));
    let train = |more: &str| kiln(format!("train decoder {SMALL} {more}").split_whitespace());
    let said = train(&format!("--out {} --steps 4 --memory-budget {budget}", text(&one))).ok().out;
    assert!(said.starts_with("memory budget ") && said.contains("% more time, estimated)"), "{said}");
    train(&format!("--out {} --steps 2 --memory-budget {budget}", text(&two))).ok();
    let settings = fs::read_to_string(two.join("config.toml")).unwrap();
    assert!(settings.contains(&format!("memory_budget = \"{budget}\"")) && settings.contains("recompute = \"auto,what="), "{settings}");
    let resume = |more: &str| kiln(format!("train --out {} --resume --threads 1 --steps 4 {more}", text(&two)).split_whitespace());
    resume("--pass recompute=off").fails(&["more than memory_budget", "--memory-budget again"]);
    resume("--memory-budget 1KiB").fails(&["does not fit into a memory budget of 1.00 KiB", "the smallest plan takes"]);
    let said = resume("").ok().out;
    assert!(!said.contains("memory budget "), "nothing is chosen again: {said}");
    same_bytes(&checkpoint(&one, 4), &checkpoint(&two, 4));
    assert_eq!(losses(&one), losses(&two));
    // More memory: the batch stays what it was.
    let said = kiln(format!("train --out {} --resume --threads 1 --steps 5 --memory-budget 1GiB", text(&two)).split_whitespace()).ok().out;
    assert!(said.contains("memory budget 1.00 GiB: it fits as it is"), "{said}");
    let settings = fs::read_to_string(two.join("config.toml")).unwrap();
    assert!(!settings.contains("recompute = "), "what the smaller budget chose is taken back: {settings}");
}

/// A budget that is lowered begins with the run's own passes, not with what the one before it chose; and what someone has set since then stays.
#[test]
fn another_budget_chooses_anew() {
    let own = config("decoder", &["passes.recompute=auto,what=siblings", "passes.flash-attention=auto"]);
    let (mut c, _) = own.of_checkpoint(&own.to_json()).unwrap();
    let before = c.clone();
    for pass in ["recompute=auto,what=blocks", "offload=auto", "adam8bit=auto"] {
        c.set_pass_argument(pass).unwrap();
    }
    c.note_budget(&before);
    let resumed = || own.of_checkpoint(&c.to_json()).unwrap().0;
    let passes = |c: &Config| c.to_json()["passes"].clone();
    let mut same = resumed();
    same.undo_budget(false);
    assert_eq!(same, resumed());
    let mut anew = resumed();
    anew.undo_budget(true);
    // What rounds is part of what the run computes.
    let expected = serde_json::json!({ "recompute": "auto,what=siblings", "flash-attention": "auto", "adam8bit": "auto" });
    assert_eq!(passes(&anew), expected);
    let mut set = resumed();
    set.set_pass_argument("recompute=off").unwrap();
    set.undo_budget(false);
    let mut later = own.of_checkpoint(&set.to_json()).unwrap().0;
    later.undo_budget(true);
    assert_eq!(passes(&later)["recompute"], "off");
    assert!(passes(&later).get("offload").is_none());
}

/// One line of the command line chose it: its figures are in the JSON, too.
#[test]
fn a_plan_in_json_has_what_was_chosen() {
    let plan = |budget: &[&str]| -> serde_json::Value {
        let args = "plan decoder --threads 1 --json --set seq=32 --set batch=4 --set layers=3";
        serde_json::from_str(&kiln(args.split(' ').chain(budget.iter().copied())).ok().out).unwrap()
    };
    let (whole, smallest) = ends(&config("decoder", &["seq=32", "batch=4", "layers=3"]), true);
    let budget = (smallest + (whole - smallest) / 4) >> 10;
    let found = plan(&["--memory-budget", &format!("{budget}KiB")]);
    for program in found.as_array().unwrap() {
        assert_eq!(program["memory_budget"], budget << 10);
        assert!(program["chosen"].as_array().is_some_and(|c| !c.is_empty()) && program["estimated_more_time"].is_f64(), "{program}");
    }
    assert!(plan(&[]).as_array().unwrap().iter().all(|program| program.get("chosen").is_none()));
}

#[test]
fn sizes_and_blocks_that_are_none_are_refused() {
    for command in ["train decoder --out none", "plan decoder", "bench decoder"] {
        for (size, why) in
            [("8GB!", "is not a size such as 8GiB"), ("-8GiB", "is not a size"), ("0GiB", "no memory at all"), ("8", "name its unit")]
        {
            kiln(command.split(' ').chain([&*format!("--memory-budget={size}")])).fails(&["--memory-budget: ", why]);
        }
    }
    kiln(["plan", "decoder", "--set", "memory_budget=8GB!"]).fails(&["memory_budget", "is not a size such as 8GiB"]);
    kiln(["plan", "decoder", "--memory-budget", "8GiB", "--allow", "adam9bit"]).fails(&["adam9bit", "did you mean 'adam8bit'?"]);
    for pass in ["fp8", "sparse-2:4", "fp16", "recompute"] {
        kiln(["plan", "decoder", "--memory-budget", "8GiB", "--allow", pass]).fails(&[&format!("--allow {pass}"), "adam8bit or bf16"]);
    }
    kiln(["bench", "ops", "--memory-budget", "8GiB"]).fails(&["--memory-budget is for a recipe's step"]);
    let plan = |value: &str| kiln(["plan", "decoder", "--threads", "1", "--json", "--pass", &format!("recompute=auto,{value}")]);
    plan("what=blocks,layers=0-4").fails(&["layers names block 4, but the model has 4 blocks, 0-3"]);
    plan("what=blocks,layers=1-0").fails(&["layers=1-0 is not all, or blocks such as 3, 0-11 or 0-5,12-17"]);
    plan("layers=0").fails(&["layers=0 is for what=blocks"]);
    for price in ["", "what=blocks,", "what=blocks,layers=0,", "what=blocks,rest=siblings,layers=0,"] {
        plan(&format!("{price}spare=64")).fails(&["recompute", "spare=64 is for what=memory-bound"]);
        plan(&format!("{price}price=2")).fails(&["recompute", "price=2 is for what=memory-bound"]);
    }
    for rest in ["rest=memory-bound", "what=memory-bound,rest=memory-bound", "what=blocks,rest=memory-bound"] {
        plan(rest).fails(&["recompute", "rest=memory-bound is for what=blocks with layers=.."]);
    }
    for used in ["what=memory-bound,spare=64,price=2", "what=blocks,layers=0,rest=memory-bound,spare=64"] {
        plan(used).ok();
    }
    plan("what=blocks,rest=nothing").fails(&["rest=nothing is not one of siblings, memory-bound"]);
    let activations = |value: &str| {
        let plan: serde_json::Value = serde_json::from_str(&plan(value).ok().out).unwrap();
        plan[0]["activations"].as_u64().unwrap()
    };
    let some = ["what=siblings", "what=blocks,layers=0", "what=blocks,layers=0,2", "what=blocks,layers=0-2"].map(activations);
    assert!(some.is_sorted_by(|a, b| a > b), "{some:?}");
    assert_eq!(activations("what=blocks,layers=0-3"), activations("what=blocks"));
}

const GIB: u64 = 1 << 30;

/// What a card with so much free memory recomputes.
fn on_a_card(c: &Config, free: u64) -> Option<Fitted> {
    let limits = Limits { target: imagined(90), free: Some(free), allowed: &[], split: false };
    run::fit_device(&*task(c), c, &limits).unwrap()
}

fn recomputed(c: &Config) -> Option<&str> {
    c.pass("recompute").and_then(|v| v.as_str())
}

/// The receipt of `recompute` in the program that trains.
fn receipt(c: &Config) -> String {
    let programs = run::compile_for(&*task(c), &c.switches().unwrap(), imagined(90), None).unwrap();
    let all = programs.iter().find(|(name, _)| *name == "train").map(|(_, c)| c.receipts.clone()).unwrap();
    all.iter().find(|r| r.pass == "recompute").unwrap().summary()
}

#[test]
fn what_is_recomputed_follows_from_the_memory_that_the_device_has() {
    let c = recipe::preset(recipe::find("decoder").unwrap(), Some("gpt2-124m")).unwrap();
    let large = on_a_card(&c, 20 * GIB).unwrap();
    assert!(large.changes.is_empty() && recomputed(&large.config).is_none(), "{:?}", large.changes);
    assert!(receipt(&large.config).contains("no more, because it fits (16.6 GiB planned)"), "{}", receipt(&large.config));
    let mut last = large.seconds[1];
    for free in [15, 7] {
        let some = on_a_card(&c, free * GIB).unwrap_or_else(|| panic!("{free} GiB are not enough"));
        assert!(some.peaks[0] == large.peaks[0] && some.peaks[1] <= free * GIB * 95 / 100, "{free} GiB: {:?}", some.peaks);
        assert!(some.seconds[1] > last && some.changes.len() == 1, "{free} GiB: {:?}", some.changes);
        assert!(receipt(&some.config).contains("as little as fits into"), "{}", receipt(&some.config));
        last = some.seconds[1];
        // It goes on as it began as long as that fits, and else chooses anew.
        let (run, _) = Config::of_run(recipe::find("decoder").unwrap().sections(), some.config.to_toml().parse().unwrap()).unwrap();
        let same = on_a_card(&run, 20 * GIB).unwrap();
        assert!(same.changes.is_empty() && recomputed(&same.config) == recomputed(&some.config));
        assert!(receipt(&same.config).contains("chosen when the run began, and fits"), "{}", receipt(&same.config));
        let less = on_a_card(&run, 7 * GIB).unwrap();
        assert!(less.peaks[1] <= 7 * GIB && (free == 7) == less.changes.is_empty(), "{:?}", less.changes);
        assert_eq!(recomputed(&less.config), recomputed(&on_a_card(&c, 7 * GIB).unwrap().config), "from {free} GiB");
    }
    assert!(on_a_card(&c, 3 * GIB).is_none(), "more than recomputation is needed");
    for asked in ["off", "auto", "auto,what=memory-bound"] {
        let mut c = c.clone();
        c.set_pass_argument(&format!("recompute={asked}")).unwrap();
        assert!(on_a_card(&c, 7 * GIB).is_none(), "{asked} was asked for");
    }
}
