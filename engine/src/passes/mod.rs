//! Named rewrites of a graph, in stages. Each can be switched, and leaves a receipt.

mod adam8bit;
mod autodiff;
mod chunked_scan;
mod data_parallel;
mod dead_code;
mod decompose;
mod fp8;
mod gemm_epilogue;
pub use dead_code::sweep;
mod cse;
mod flash_attention;
mod fuse_decode;
mod fuse_norm;
mod fuse_pointwise;
mod fuse_qk_norm;
mod fuse_quantize;
mod gemm_pointwise;
mod grouped_gemm;
mod hoist;
mod in_place;
mod layout;
mod linear_attention;
mod linear_ce;
mod lora_backward;
mod lora_forward;
mod merge_adapters;
mod merged_qkv;
mod merged_wgrad;
mod mixed;
mod overlap_gradients;
mod partition;
pub mod pattern;
mod presets;
mod recompute;
mod sparse;
mod switches;
mod tensor_parallel;
mod terms;
mod zero;
mod zero_weights;

pub use fp8::{keeps_weights, repeated};
pub use merge_adapters::{MERGED, follows, phase};
pub use presets::{Preset, Rounding};
pub use sparse::pruned;
pub use switches::{
    Mode, Numerics, OnRanks, Receipt, Setting, Settings, Switch, Switches, Target, WarmUp, did_you_mean, known, meant, nearest,
};
pub use terms::SCRATCH;

use crate::error::Error;
use crate::executor::EXECUTOR;
use crate::graph::{Graph, Kind};
use crate::meta::{DType, MOST_BYTES};
use crate::record::MOST_TABLE;
use crate::store::Store;

/// What passes make of a recorded graph, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// As the model's code recorded it: composite ops, f32 throughout, gradients as Grad nodes.
    Recorded,
    /// Composite ops are replaced by fused ops, or by the plain ops that define them.
    Fused,
    /// Every value has the type that it is computed in.
    Typed,
    /// Gradients are ordinary ops; dead code is removed.
    Differentiated,
    /// Nodes are in execution order, recomputed activations included.
    Scheduled,
    /// Ops are those that the executor launches, with input strides that they can read.
    Lowered,
}

/// A rewrite of the graph.
pub trait Pass: Switch {
    /// The stage that the graph is in once this pass and the others of its stage have run.
    fn stage(&self) -> Stage;

    /// Passes that must run before this one, because it matches what they produce, or would rewrite what they match.
    fn after(&self) -> &'static [&'static str] {
        &[]
    }

    /// Rewrites the graph, and counts in the receipt where it applied and why it declined elsewhere.
    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error>;
}

/// The engine's passes in execution order: by stage, and after the passes that each names in [`Pass::after`].
pub const PASSES: &[&dyn Pass] = &[
    &data_parallel::DataParallel,
    &tensor_parallel::TensorParallel,
    &zero::Zero,
    &flash_attention::FlashAttentionPass,
    &linear_attention::LinearAttentionPass,
    &chunked_scan::ChunkedScanPass,
    &linear_ce::LinearCe,
    &fuse_norm::FuseNorm,
    &fuse_qk_norm::FuseQkNorm,
    &adam8bit::Adam8bit,
    &cse::Cse,
    &sparse::Sparse,
    &decompose::Decompose,
    &mixed::Mixed(DType::BF16),
    &mixed::Mixed(DType::F16),
    &merge_adapters::MergeAdapters,
    &fuse_decode::FuseDecode,
    &merged_qkv::MergedQkv,
    &autodiff::Autodiff,
    &dead_code::DeadCode,
    &zero::Scatter,
    &fp8::Fp8,
    &hoist::Hoist,
    &recompute::Recompute,
    &zero_weights::ZeroWeights,
    &lora_forward::LoraForward,
    &gemm_epilogue::GemmEpilogue,
    &merged_wgrad::MergedWgrad,
    &lora_backward::LoraBackward,
    &fuse_pointwise::FusePointwise,
    &gemm_pointwise::GemmPointwise,
    &fuse_quantize::FuseQuantize,
    &overlap_gradients::OverlapGradients,
    &in_place::InPlace,
    &grouped_gemm::GroupedGemm,
    &layout::LayoutPass,
];

/// Former names of passes, so that older configs and commands still work. None: the pass was removed because it gained too little.
pub const FORMERLY: &[(&str, Option<&str>)] = &[
    ("share", Some("cse")),
    ("merge-products", Some("merged-qkv")),
    ("join-products", Some("merged-wgrad")),
    ("extend-products", Some("lora-forward")),
    ("narrow-products", Some("lora-backward")),
    ("fuse-products", Some("gemm-pointwise")),
    ("epilogue", Some("gemm-epilogue")),
    ("grouped-products", Some("grouped-gemm")),
    ("linear-ce", Some("linear-cross-entropy")),
    ("few-rows", Some("fuse-decode")),
    ("tune-products", Some("autotune")),
    ("fuse-routing", None),
    ("group-casts", None),
];

/// Everything that can be switched: passes in execution order, then settings of the executor.
pub fn all() -> impl Iterator<Item = &'static dyn Switch> {
    let passes = crate::extension::passes().into_iter().map(|p| p as &dyn Switch);
    passes.chain(EXECUTOR.iter().map(|e| e as &dyn Switch))
}

/// Whether a pass adds the state of this name to a program, for itself.
pub fn keeps(state: &str) -> bool {
    [fp8::STATES, mixed::STATES].iter().any(|s| state.starts_with(s))
}

/// The setting that gives a pass's state this shape: `fp8 history=16`.
pub fn setting_of(state: &str, shape: &[usize]) -> Option<String> {
    let (pass, rest) = state.split_once('.')?;
    let history = keeps(state) && rest.starts_with("history/");
    shape.get(1).filter(|_| history).map(|steps| format!("{pass} history={steps}"))
}

/// Where a program computes in fp16: its loss scale, and how many runs overflowed.
pub fn loss_scale(store: &Store) -> Result<Option<(f32, f32)>, Error> {
    mixed::loss_scale(store)
}

/// Runs all passes on a graph, registered ones included, and returns a receipt of each.
pub fn run(g: &mut Graph, switches: &Switches, target: Target) -> Result<Vec<Receipt>, Error> {
    run_watched(g, switches, target, &mut |_, _, _| {})
}

/// Whether a graph is as a pass finds it, or as it leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The pass has not run yet.
    Before,
    /// It has.
    After,
}

/// As [`run`], and shows the graph before and after every pass to `look`.
pub fn run_watched(
    g: &mut Graph,
    switches: &Switches,
    target: Target,
    look: &mut dyn FnMut(&'static str, When, &Graph),
) -> Result<Vec<Receipt>, Error> {
    check_sizes(g)?;
    let mut receipts = vec![];
    for pass in crate::extension::passes() {
        look(pass.name(), When::Before, g);
        let receipt = switches.apply(pass, target, |settings, receipt| pass.apply(g, settings, receipt))?;
        check_sizes(g)?;
        look(pass.name(), When::After, g);
        receipts.push(receipt);
    }
    Ok(receipts)
}

/// Refuses tensors too large for any memory, by name, before anything multiplies their sizes or allocates them.
fn check_sizes(g: &Graph) -> Result<(), Error> {
    for node in &g.nodes {
        let limit = if matches!(node.kind, Kind::Const(_)) { MOST_TABLE } else { MOST_BYTES };
        if let Some(meta) = node.outputs.iter().find(|m| m.bytes() > limit) {
            let scope = if node.scope.is_empty() { "the top level" } else { &*node.scope };
            let what = match &node.kind {
                Kind::State(s) => format!("state '{}'", s.name),
                Kind::Feed(name) => format!("feed '{name}'"),
                Kind::Const(_) => format!("a table (in {scope})"),
                _ => format!("a result of {} (in {scope})", node.name()),
            };
            return Err(Error::TooLarge { what, meta: meta.clone(), limit });
        }
    }
    Ok(())
}

/// An error if a pass with mode `require` applied nowhere in these programs, which belong to one run.
pub fn all_applied<'a>(programs: impl Iterator<Item = &'a [Receipt]> + Clone) -> Result<(), Error> {
    for pass in all() {
        let mut own = programs.clone().flatten().filter(|r| r.pass == pass.name() && r.mode == Mode::Require).peekable();
        if own.peek().is_some() && own.all(|r| r.applied == 0) {
            return Err(Error::NoSites(pass.name().into()));
        }
    }
    Ok(())
}
