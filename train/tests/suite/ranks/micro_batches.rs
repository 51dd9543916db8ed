//! Steps of several micro-batches on several ranks, and the rows that each rank makes of them.

use super::{
    DECODER, Divided, EXPERTS, GATHERED, GPT2, HRM_LM, HYDRA, LIOR, POLYCHROMIC, SMALL, Small, TOKENS, config, numbers, same_within, train,
};
use engine::ranks::threads;
use engine::{Cpu, Device};
use kiln::checkpoint;
use kiln::config::{Config, Section, TrainConfig};
use kiln::data::{DataError, Item, Source};
use kiln::recipe::{self, Feeds, Model, Supervised, Task, TrainError};
use kiln::run::{self, Start};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Steps of several micro-batches, divided in every way.
const SUMMED: &[Divided] = &[
    (
        DECODER,
        &["train.accumulate=3"],
        &[
            ([2, 1], &[]),
            ([4, 1], &["passes.zero=auto"]),
            ([2, 1], GATHERED),
            ([2, 2], &[]),
            ([2, 2], GATHERED),
            ([2, 2], TOKENS),
            ([2, 1], &["passes.overlap-gradients=off"]),
        ],
    ),
    (DECODER, &["train.accumulate=4", "train.clip=0.01", "train.ema=0.9"], &[([2, 1], &["passes.zero=auto"]), ([4, 1], GATHERED)]),
    (DECODER, &["train.accumulate=2", "passes.bf16=auto"], &[([2, 1], &[])]),
    (DECODER, &["train.accumulate=2", "passes.fp16=auto,scale=16777216,interval=4"], &[([2, 1], &["passes.zero=auto"])]),
    (DECODER, &["train.accumulate=2", "train.optimizer=muon"], &[([2, 1], &["passes.zero=auto"]), ([4, 1], GATHERED)]),
    (DECODER, &["train.accumulate=2", "passes.adam8bit=auto,least=256"], &[([2, 1], &["passes.zero=auto"])]),
    (GPT2, &["train.accumulate=2"], &[([4, 1], &["passes.zero=auto"]), ([2, 2], &[])]),
    (HYDRA, &["train.accumulate=2"], &[([2, 1], GATHERED), ([2, 2], &[])]),
    (SMALL[2], &["train.accumulate=2"], &[([2, 1], &[])]),
    (EXPERTS, &["train.accumulate=2"], &[([2, 1], &[]), ([2, 1], GATHERED), ([1, 2], &[])]),
    (LIOR, &["train.accumulate=2", "train.eval_batch=2"], &[([2, 1], &[]), ([1, 2], &[])]),
    (POLYCHROMIC, &["train.accumulate=2"], &[([2, 1], &["passes.zero=auto"])]),
    // Places of experts are those of a micro-batch.
    (HRM_LM, &["train.accumulate=2"], &[([2, 1], &[])]),
    // Nine replies are not divided: each rank computes the policy's gradient of all, beside its own part of the supervised one.
    (POLYCHROMIC, &["train.accumulate=2", "objective.prompts=3", "objective.replies=3"], &[([2, 1], GATHERED)]),
];

#[test]
fn micro_batches_add_up_to_the_same_on_several_ranks() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (of, settings, ways)) in SUMMED.iter().enumerate() {
        let steps = ["train.steps=8", "train.eval_every=8", "train.save_every=8"];
        let at = |way: &str| dir.path().join(format!("{i}-{way}"));
        train(*of, &[&steps[..], settings].concat(), [1, 1], &at("one"), Start::New, None);
        for (k, (ranks, passes)) in ways.iter().enumerate() {
            let out = at(&k.to_string());
            train(*of, &[&steps[..], settings, passes].concat(), *ranks, &out, Start::New, None);
            // Where activations are rounded to bf16 or fp16, a last digit may become a rounding.
            let times = if settings.iter().any(|s| s.contains("f16=")) { 20.0 } else { 1.0 };
            same_within(times, &format!("{} {settings:?} on {ranks:?} ranks, {passes:?}", of.0), &out, &at("one"));
        }
    }
}

/// What the ranks with different examples exchange of tensors that are larger than a few numbers, by op; and the bytes of the sums of gradients.
fn exchanged(graph: &engine::Graph) -> (BTreeMap<&'static str, usize>, usize) {
    use engine::ops::collective::{AllGather, AllReduce, ReduceScatter};
    let mut all = BTreeMap::new();
    for node in &graph.nodes {
        let sum = node.op::<AllReduce>().map(|o| (&o.group, "all_reduce"));
        let part = node.op::<ReduceScatter>().map(|o| (&o.group, "reduce_scatter"));
        let Some((group, name)) = sum.or(part).or(node.op::<AllGather>().map(|o| (&o.group, "all_gather"))) else { continue };
        let large = node.inputs.iter().map(|v| graph.meta(*v).bytes()).filter(|bytes| *bytes > 16);
        if group.name == "data" {
            *all.entry(name).or_default() += large.sum::<usize>();
        }
    }
    all.retain(|_, bytes| *bytes > 0);
    let sums = graph.states().filter(|(s, _)| s.name.starts_with("scratch/grad/")).map(|(_, meta)| meta.bytes());
    let sums = sums.filter(|bytes| *bytes > 16).sum();
    (all, sums)
}

/// No micro-batch exchanges a gradient; the update exchanges the sums of all, once, and with `zero` each rank gets its part alone.
#[test]
fn gradients_are_exchanged_once_a_step() {
    const ZERO: &[&str] = &["passes.zero=auto"];
    let mut ways: Vec<(Small, [usize; 2], &[&str])> =
        vec![(DECODER, [2, 1], GATHERED), (DECODER, [2, 2], TOKENS), (DECODER, [2, 1], &["passes.bf16=auto"])];
    for of in [DECODER, GPT2, HYDRA, SMALL[2], POLYCHROMIC] {
        ways.extend([(of, [2, 1], &[][..]), (of, [4, 1], ZERO), (of, [2, 2], ZERO)]);
    }
    for (of, [data, tensor], passes) in ways {
        let what = format!("{} on {data} x {tensor} ranks, {passes:?}", of.0);
        let mut config = config(of, &[&["train.accumulate=2", "passes.overlap-gradients=auto,bucket=0"], passes].concat());
        config.ranks = engine::Ranks::planned(data, tensor);
        let task = recipe::find(of.0).unwrap().task(&config).unwrap();
        let switches = config.switches().unwrap();
        let compiled: BTreeMap<&str, engine::Compiled> = (task.graphs().into_iter())
            .map(|(name, graph)| (name, engine::Compiled::new(graph, &switches, engine::passes::Target::Cpu).unwrap()))
            .collect();
        let gathers = passes == GATHERED;
        for (name, c) in compiled.iter().filter(|(name, _)| ["micro", "policy"].contains(*name)) {
            let (all, sums) = exchanged(&c.graph);
            let summed = all.contains_key("all_reduce") || all.contains_key("reduce_scatter");
            // The policy's replies are compared with those of all ranks.
            let gathered = all.contains_key("all_gather") && !gathers && *name == "micro";
            assert!(sums > 1000 && !summed && !gathered, "{what}, {name}: {all:?} of {sums}");
        }
        let (all, sums) = exchanged(&compiled["update"].graph);
        let [reduced, scattered] = ["all_reduce", "reduce_scatter"].map(|name| all.get(name).copied().unwrap_or(0));
        assert_eq!(reduced + scattered, sums, "{what}: {all:?}");
        let divided = passes == ZERO || gathers;
        // Weights that have no equal parts are reduced whole.
        assert!(if divided { scattered > 9 * reduced } else { scattered == 0 }, "{what}: {all:?}");
    }
}

/// Ranks that run different exchanges wait for each other for ever. Nine replies cannot be divided, so each rank has the gradient of all.
#[test]
fn every_rank_runs_the_same_exchanges() {
    let (recipe, small) = POLYCHROMIC;
    let settings = ["train.accumulate=2", "objective.prompts=3", "objective.replies=3"];
    let config = config((recipe, small), &[&settings[..], GATHERED].concat());
    let exchanges = threads::each(2, 1, |ranks| {
        let mut config = config.clone();
        config.ranks = ranks;
        let (task, switches) = (recipe::find(recipe).unwrap().task(&config).unwrap(), config.switches().unwrap());
        let of = |(name, graph): (&'static str, engine::Graph)| {
            let graph = engine::Compiled::new(graph, &switches, engine::passes::Target::Cpu).unwrap().graph;
            let shapes = |n: &engine::graph::Node| format!("{} {:?}", n.name(), n.outputs[0].shape);
            let named = |n: &&engine::graph::Node| ["all_reduce", "reduce_scatter", "all_gather"].contains(&n.name());
            (name, graph.nodes.iter().filter(named).map(shapes).collect::<Vec<_>>())
        };
        task.graphs().into_iter().map(of).collect::<BTreeMap<_, _>>()
    });
    assert!(exchanges[0]["policy"].len() > 10, "{:?}", exchanges[0]["policy"]);
    assert_eq!(exchanges[0], exchanges[1]);
}

/// A run of several micro-batches a step goes on from its checkpoint, on as many ranks bit for bit, and on others: nothing of a sum is in it.
#[test]
fn micro_batches_go_on_from_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        ["train.steps=6", "train.eval_every=6", "train.save_every=3", "train.horizon=6", "train.accumulate=3", "passes.zero=auto"];
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    train(DECODER, &settings, [1, 1], &one, Start::New, None);
    train(DECODER, &settings, [2, 1], &two, Start::New, None);
    let step = |run: &Path, n: u64| checkpoint::open(&run.join(format!("checkpoints/step-{n:08}"))).unwrap();
    let names = step(&two, 3).file("state.safetensors").unwrap().names();
    assert!(names.iter().any(|n| n.starts_with("adam.m/")) && names.iter().all(|n| !n.starts_with(engine::SCRATCH)), "{names:?}");
    for ranks in [[1, 1], [2, 1], [4, 1], [2, 2]] {
        let again = dir.path().join(format!("{ranks:?}"));
        train(DECODER, &settings, ranks, &again, Start::From(two.join("checkpoints/step-00000003")), None);
        let (a, b) = (numbers(&again), numbers(&one));
        let name = "loss of step 6";
        assert!((a[name] - b[name]).abs() < 1e-5 * b[name].abs(), "{ranks:?}: {} {}", a[name], b[name]);
        if ranks == [2, 1] {
            for file in ["model.safetensors", "state.safetensors"] {
                let [a, b] = [&again, &two].map(|run| step(run, 6).file(file).unwrap());
                assert!(a.names().iter().all(|n| a.get(n).unwrap().2 == b.get(n).unwrap().2), "{file} is another");
            }
        }
    }
}

/// Item i is four times the number i % 16.
struct Numbers {
    made: AtomicUsize,
    counted: Option<usize>,
}

impl Source for Numbers {
    fn len(&self) -> u64 {
        1000
    }
    fn item(&self, i: u64) -> Result<Item, DataError> {
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Item { ids: vec![(i % 16) as i32; 4], targets: vec![1; 4], ..Item::default() })
    }
    fn counted(&self) -> Option<usize> {
        self.counted
    }
    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

struct Table(Arc<Numbers>);

impl Model for Table {
    fn seq(&self) -> usize {
        4
    }
    fn vocab(&self) -> usize {
        16
    }
    fn loss<'g>(&self, r: &'g engine::Recorder, batch: usize) -> Vec<(&'static str, engine::Var<'g>)> {
        let f = Feeds::new(r, batch, 4);
        let table = r.param("table", &[16, 4], engine::Init::Normal { std: 1.0 });
        vec![("loss", table.gather_rows(f.ids).square().sum() * f.weight)]
    }
    fn source(&self, _: bool) -> Result<Arc<dyn Source>, TrainError> {
        Ok(self.0.clone())
    }
}

/// A rank makes its own rows of every batch where the others need not be known, and trains the same.
#[test]
fn each_rank_makes_its_own_rows() {
    const STEPS: u64 = 10;
    let trained = |ranks: usize, counted: Option<usize>, accumulate: usize| {
        threads::each(ranks, 1, |ranks| {
            let text = format!("seed = 3\n[train]\nbatch = 8\naccumulate = {accumulate}\n");
            let mut c = Config::preset("table", "test", vec![TrainConfig::keys("train")], &text);
            c.ranks = ranks;
            let source = Arc::new(Numbers { made: AtomicUsize::new(0), counted });
            let mut task = Supervised::new(Table(source.clone()), c.section::<TrainConfig>("train").unwrap(), c.seed());
            let mut s = run::load(&task, &c, &Device::cpu(Cpu::new(1))).unwrap();
            task.begin(0).unwrap();
            (0..STEPS).for_each(|step| task.step(&mut s, step, 1e-2).unwrap());
            let table = s.store.get("table").unwrap().f32().unwrap();
            drop(task);
            (table, source.made.load(Ordering::Relaxed))
        })
    };
    for accumulate in [1, 2] {
        let alone = trained(1, None, accumulate).remove(0).0;
        // A loader is two steps ahead, and has one batch more in the making and one in its hands.
        let (least, most) = (STEPS as usize * accumulate, (STEPS as usize + 2) * accumulate + 2);
        for (counted, rows) in [(Some(4), 2), (None, 8)] {
            for (table, made) in trained(4, counted, accumulate) {
                assert!((rows * least..=rows * most).contains(&made), "{made} items, {rows} rows in {STEPS} steps");
                assert!(table.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 1e-5), "{counted:?}: {table:?} {alone:?}");
            }
        }
    }
}
