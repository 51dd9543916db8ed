//! Planning: how long it takes, and what it refuses.

use crate::common::{SMALL, kiln};
use engine::passes::Target;
use engine::{Compiled, Switches};
use kiln::recipe;
use std::time::{Duration, Instant};

/// Time that this thread has computed, so that others on the machine do not count; where the system does not say, any time.
fn computed(since: Instant) -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|n| n.parse().ok()).map_or_else(|| since.elapsed(), Duration::from_nanos)
}

fn compiled(recipe: &str, settings: &[&str], switches: &Switches) -> Result<Compiled, engine::Error> {
    let recipe = recipe::find(recipe).unwrap();
    let mut config = recipe::preset(recipe, Some("tiny")).unwrap();
    settings.iter().for_each(|s| config.set(s).unwrap());
    let (_, graph) = recipe.task(&config).unwrap().graphs().into_iter().next().unwrap();
    Compiled::new(graph, switches, Target::Cpu)
}

/// What it takes to record, rewrite and plan a training step.
fn planned(recipe: &str, settings: &[&str]) -> f64 {
    let since = Instant::now();
    let start = computed(since);
    compiled(recipe, settings, &Switches::default()).unwrap();
    (computed(since) - start).as_secs_f64()
}

#[test]
fn planning_takes_time_with_depth_and_not_with_its_square() {
    // Eight times the blocks take hydra 11.5 to 14 times the time: 4.1 ms a block, and 46 us for every pair of them. A look through the whole graph at
    // every node made it more than 30. Neighbours only add to a time, so the shortest counts, of as many as it takes.
    for (recipe, depth, others) in
        [("hydra", "model.blocks", &["model.edge_capacity=[1.0]", "model.middle_capacity=[0.5]"][..]), ("polychromic", "model.layers", &[])]
    {
        let time = |n: usize| planned(recipe, &[others, &[&format!("{depth}={n}")]].concat());
        let mut shortest = [f64::INFINITY; 2];
        let mut ratio = f64::INFINITY;
        for _ in 0..10 {
            shortest = [shortest[0].min(time(6)), shortest[1].min(time(48))];
            ratio = shortest[1] / shortest[0];
            if ratio <= 18.0 {
                break;
            }
        }
        assert!(ratio <= 18.0, "{recipe}: {ratio} times the time for 8 times the depth ({shortest:?} s)");
    }
}

/// As `kiln train` does.
#[test]
fn a_batch_that_ranks_cannot_divide_is_refused() {
    for ranks in ["3", "99999999"] {
        let ran = kiln(["plan", "decoder", "--preset", "tiny", "--set", "train.batch=4", "--ranks", ranks]);
        assert_ne!(ran.code, Some(0), "{ran:#?}");
        assert!(ran.err.contains(&format!("train.batch = 4 cannot be divided among {ranks} ranks")), "{ran:#?}");
    }
    let loads = |us: &str, ignore: &str| {
        let fixed = ["plan", "decoder", "--preset", "tiny", "--set", "train.batch=4", "--scaling", "1,2", "--example-us", us];
        kiln(fixed.into_iter().chain(["--set", ignore]))
    };
    assert!(loads("inf", "data.ignore_tokens=[]").err.contains("--example-us inf"));
    // Examples of a second each are longer than any step: a rank makes its own four, or all eight where some targets do not count.
    for (ignore, ms) in [("data.ignore_tokens=[]", "4000.0"), ("data.ignore_tokens=[3]", "8000.0")] {
        let out = loads("1000000", ignore).ok().out;
        assert!(out.lines().nth(2).is_some_and(|line| line.matches(ms).count() == 2), "{out}");
    }
}

#[test]
fn what_is_about_several_ranks_is_refused_for_one() {
    for flag in ["--bandwidth", "--network", "--node", "--step-ms", "--tensor"] {
        let plan = |more: &[&str]| kiln([&["plan", "decoder", "--preset", "tiny", flag, "1"], more].concat());
        let refused = plan(&[]);
        assert!(refused.code == Some(2) && ["--ranks", "--scaling"].iter().all(|f| refused.err.contains(f)), "{flag}: {refused:#?}");
        plan(&["--ranks", "2"]).ok();
    }
}

#[test]
fn a_tensor_that_no_memory_holds_is_refused_by_name() {
    let most = ["model.dim=1048576", "model.vocab=1048576", "model.hidden=1048576"];
    let refused = |settings: &[&str], flash: &str, parts: &[&str]| {
        let switches = Switches::default().with("flash-attention", flash).unwrap();
        let error = compiled("hydra", settings, &switches).err().expect("too large").to_string();
        assert!(parts.iter().all(|p| error.contains(p)), "{error}");
    };
    refused(&most, "auto", &["state 'embedding' is f32[1048576, 1048576], which takes more than 1024 GiB"]);
    // Sizes whose product has no room in 64 bits.
    refused(&[&most[..], &["train.batch=1048576", "model.seq=16"]].concat(), "auto", &["'embedding'", "1024 GiB"]);
    // Tables are made while the step is recorded.
    refused(
        &["model.dim=131072", "model.heads=2", "model.kv_heads=1", "model.seq=1048576", "train.batch=1"],
        "auto",
        &["a table", "1 GiB"],
    );
    // Only what a pass writes out is too large.
    refused(&["model.seq=1048576", "train.batch=16"], "off", &["a result of matmul (in blocks.0)", "1048576, 1048576]", "1024 GiB"]);
}

/// Published sizes of Llama-7B and Qwen2.5-7B; their weights are counted to the last one.
#[test]
fn shapes_of_seven_billion_weights_are_planned_for_a_gpu_that_is_not_here() {
    let llama = "family=llama vocab=32000 dim=4096 layers=32 heads=32 kv_heads=32 head_dim=128 hidden=11008";
    let qwen = "family=qwen2 vocab=152064 dim=3584 layers=28 heads=28 kv_heads=4 head_dim=128 hidden=18944";
    for (sizes, weights) in [(llama, 6_738_415_616u64), (qwen, 7_615_616_512)] {
        let plan = |more: &[&str]| -> serde_json::Value {
            let sets =
                sizes.split(' ').chain(["tied=false", "seq=2048", "batch=1"]).chain(more.iter().copied()).flat_map(|set| ["--set", set]);
            let passes = ["--pass", "bf16=auto", "--pass", "recompute=auto,what=blocks"];
            let all = ["plan", "decoder", "--for-sm", "90", "--json"].into_iter().chain(passes).chain(sets);
            serde_json::from_str(&crate::common::kiln(all).ok().out).unwrap()
        };
        let [whole, adapters] = [plan(&[]), plan(&["train=lora"])];
        let bytes = |plan: &serde_json::Value, program: usize, key: &str| plan[program][key].as_u64().unwrap();
        assert_eq!(bytes(&whole, 1, "state"), 4 * weights, "evaluation reads f32 weights");
        // Weights and two moments, and what the optimizer counts.
        let counts = bytes(&whole, 0, "state") - 12 * weights;
        assert!(counts < 100, "{counts}");
        assert!(bytes(&whole, 0, "activations") > 4 * weights && bytes(&whole, 0, "peak") < 128 << 30, "gradients in f32, on one card");
        // A base in bf16, and no gradients of it.
        assert!(bytes(&adapters, 0, "peak") < 2 * weights + (4 << 30));
    }
}

/// The page draws what the plan says: no two tensors at the same address at the same time, and as high as the arena.
#[test]
fn a_page_shows_memory_tensor_by_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("memory.html");
    let plan = kiln(["plan", "hydra"].iter().chain(SMALL).chain(&["--json", "--html", page.to_str().unwrap()])).ok();
    let programs: serde_json::Value = serde_json::from_str(&plan.out).unwrap();
    let html = std::fs::read_to_string(&page).unwrap();
    let mut charts = html.split("<script type=\"application/json\" id=\"chart-").skip(1).map(|c| {
        let text = c.split_once("\">").unwrap().1.split_once("</script>").unwrap().0;
        serde_json::from_str::<serde_json::Value>(text).unwrap()
    });
    for p in programs.as_array().unwrap() {
        let arena = p["activations"].as_f64().unwrap() + p["workspace"].as_f64().unwrap();
        let (arena_chart, alive) = (charts.find(|c| c["kind"] == "boxes").unwrap(), charts.find(|c| c["kind"] == "area").unwrap());
        let boxes = arena_chart["boxes"].as_array().unwrap().clone();
        // Both charts are over the same nodes, from the first that has something in the arena.
        let range = &arena_chart["x"]["range"];
        assert!(range == &alive["x"]["range"] && range[0] == alive["at"][0], "{range} and {}", alive["x"]);
        assert!(boxes.iter().any(|b| b["x"][0] == range[0]) && boxes.iter().all(|b| b["x"][1].as_f64() <= range[1].as_f64()), "{range}");
        let of = |b: &serde_json::Value, axis: &str| [0, 1].map(|i| b[axis][i].as_f64().unwrap());
        let high = boxes.iter().map(|b| of(b, "y")[1]).fold(0.0, f64::max);
        assert!(high <= arena && high > 0.98 * arena, "{}: {high} of {arena}", p["program"]);
        for (i, a) in boxes.iter().enumerate() {
            for b in &boxes[..i] {
                let apart = |axis: &str| of(a, axis)[1] <= of(b, axis)[0] || of(b, axis)[1] <= of(a, axis)[0];
                assert!(apart("x") || apart("y"), "{a} and {b}");
            }
        }
        assert!(boxes.iter().any(|b| b["group"].as_str().unwrap().contains("blocks.*")), "colored by scope");
        assert!(boxes.iter().all(|b| b["name"].as_str().unwrap().ends_with('B')), "each says its size");
    }
    assert!(html.contains("train: alive at its peak, node ") && html.contains("adam.m: blocks.*"));
    kiln(["plan", "hydra", "--html", "/no/such/folder/x.html"]).fails(&["/no/such/folder/x.html"]);
}

#[test]
fn a_dump_shows_what_a_pass_changes() {
    let dump = |args: &[&str]| kiln(["plan", "hydra"].iter().chain(SMALL).chain(args));
    let changes = dump(&["--dump", "flash-attention"]).ok().out;
    let signs = |sign: &str| changes.lines().filter(|l| l.starts_with(sign)).count();
    assert!(signs("- ") > 0 && signs("+ ") > 0 && signs("# ") == 1, "{changes}");
    assert!(
        changes.contains("flash_attention") && changes.contains("+ blocks.0/flash_attention = ") && changes.contains("f32["),
        "{changes}"
    );
    let whole = dump(&["--dump", "flash-attention", "--whole"]).ok().out;
    let (before, after) = whole.split_once("# after flash-attention\n").unwrap();
    let only = |a: &str, b: &str| a.lines().filter(|l| !b.contains(*l)).count();
    assert!(before.starts_with("# before flash-attention\n") && only(before, after) > 0, "{whole}");
    assert_eq!(whole, dump(&["--dump", "flash-attention", "--whole"]).ok().out, "the same text every time");
    // Another program, and a pass with nothing to do.
    assert!(dump(&["--dump", "lora-forward", "--program", "eval"]).ok().out.contains("it changes nothing here"));
    dump(&["--dump", "flash-attention", "--program", "evil"]).fails(&["--program evil", "did you mean 'eval'?"]);
    dump(&["--dump", "flash"]).fails(&["--dump flash: there is no such pass"]);
    dump(&["--dump", "bf16"]).fails(&["off here (--pass bf16=auto"]);
    dump(&["--whole"]).fails(&["--dump"]);
    dump(&["--dump", "flash-attention", "--html", "x.html"]).fails(&["--html"]);
    // A pass that adds copies of nodes leaves the names of all others: what differs is what differs without their numbers.
    let changes = dump(&["--dump", "recompute"]).ok().out;
    let bare = |sign: &str| {
        let lines = changes.lines().filter_map(|l| l.strip_prefix(sign));
        let without = |l: &str| l.split(' ').map(|w| w.split_once('#').map_or(w, |(name, _)| name)).collect::<Vec<_>>().join(" ");
        lines.map(without).collect::<Vec<_>>()
    };
    let (before, after) = (bare("- "), bare("+ "));
    let only_numbers = before.iter().filter(|l| after.contains(l)).count();
    assert!(
        !after.is_empty() && 3 * only_numbers <= 2 * after.len(),
        "{only_numbers} of {} lines differ by numbers alone:\n{changes}",
        after.len()
    );
}
