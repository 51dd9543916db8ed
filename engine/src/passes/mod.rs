//! Named rewrites of a graph. Each can be switched, and leaves a receipt.

mod autodiff;
mod bf16;
mod cuda_graph;
mod dead_code;
mod epilogue;
pub use dead_code::sweep;
pub mod expand;
mod extend_products;
mod few_rows;
mod flash_attention;
mod fuse_decode;
mod fuse_evolution;
mod fuse_norm;
mod fuse_pointwise;
mod fuse_products;
mod fuse_qk_norm;
mod fuse_retrieval;
mod fuse_routing;
mod group_casts;
mod grouped_products;
mod hoist;
mod in_place;
mod join_products;
pub mod layout;
mod linear_attention;
mod linear_ce;
mod merge_products;
mod narrow_products;
mod products;
mod recompute;
mod share;

use crate::error::Error;
use crate::graph::{Graph, Kind};
use crate::kernel::Arch;
use crate::meta::{DType, MOST_BYTES};
use crate::record::{MOST_TABLE, Recorder};
use std::collections::BTreeMap;

/// In running order.
pub const PASSES: &[&dyn Pass] = &[
    &flash_attention::FlashAttentionPass,
    &linear_attention::LinearAttentionPass,
    &fuse_evolution::FuseEvolution,
    &fuse_retrieval::FuseRetrieval,
    &linear_ce::LinearCe,
    &fuse_norm::FuseNorm,
    &fuse_qk_norm::FuseQkNorm,
    &fuse_routing::FuseRouting,
    &share::Share,
    &bf16::Bf16,
    &few_rows::FewRowsPass,
    &fuse_decode::FuseDecode,
    &merge_products::MergeProducts,
    &autodiff::Autodiff,
    &dead_code::DeadCode,
    &hoist::Hoist,
    &recompute::Recompute,
    &extend_products::ExtendProducts,
    &epilogue::Epilogue,
    &join_products::JoinProducts,
    &narrow_products::NarrowProductsPass,
    &group_casts::GroupCasts,
    &fuse_pointwise::FusePointwise,
    &fuse_products::FuseProducts,
    &in_place::InPlace,
    &grouped_products::GroupedProducts,
    &products::Tf32,
    &products::TuneProducts,
    &cuda_graph::OverlapLaunches,
    &cuda_graph::CudaGraph,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Cpu,
    Cuda(Arch),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Off,
    Auto,
    /// As Auto, but a site that is declined is an error.
    Require,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Auto => "auto",
            Mode::Require => "require",
        }
    }
}

/// What switching a pass may change in the numbers. Decides how its test compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// Bit for bit the same.
    Exact,
    /// The same sums in another order, or a rounding less.
    Reordered,
    /// Rounded to a narrower type.
    LowPrecision,
}

/// A setting of a pass beside its mode: name, default, what it does.
pub struct Setting {
    pub name: &'static str,
    pub default: &'static str,
    pub about: &'static str,
}

pub trait Pass: Sync {
    fn name(&self) -> &'static str;
    fn about(&self) -> &'static str;
    fn numerics(&self, target: Target, dtype: DType) -> Numerics;
    fn apply(&self, g: &mut Graph, settings: &Settings, receipt: &mut Receipt) -> Result<(), Error>;
    /// A step on which the pass has something to do. Its states and feeds are filled by the harness.
    fn example(&self, r: &Recorder);

    fn default_mode(&self) -> Mode {
        Mode::Auto
    }

    fn settings(&self) -> &'static [Setting] {
        &[]
    }

    /// Switched on like this, it has something to do in its example.
    fn variants(&self) -> &'static [&'static str] {
        &["auto"]
    }

    /// Does something on a GPU only.
    fn needs_gpu(&self) -> bool {
        false
    }

    /// A pass without which the example cannot run is compared with itself in another setting.
    fn always_on(&self) -> bool {
        false
    }
}

/// The values of a pass's settings.
pub struct Settings<'a> {
    pub target: Target,
    pass: &'static dyn Pass,
    values: &'a BTreeMap<String, String>,
}

impl Settings<'_> {
    pub fn text(&self, name: &str) -> &str {
        let known = self.pass.settings().iter().find(|s| s.name == name).expect("a pass reads its own settings");
        self.values.get(name).map_or(known.default, |v| v)
    }

    pub fn number(&self, name: &str) -> Result<usize, Error> {
        self.from(name, 1)
    }

    /// A number that may be zero.
    pub fn number_or_none(&self, name: &str) -> Result<usize, Error> {
        self.from(name, 0)
    }

    fn from(&self, name: &str, least: usize) -> Result<usize, Error> {
        let text = self.text(name);
        let problem = || format!("{name}={text} is not a number from {least} on");
        let number = text.parse().ok().filter(|&n| n >= least);
        number.ok_or_else(|| Error::PassSetting { pass: self.pass.name().into(), problem: problem() })
    }

    /// Which of these words a setting is.
    pub fn one_of(&self, name: &str, words: &[&'static str]) -> Result<&'static str, Error> {
        let text = self.text(name);
        let problem = || format!("{name}={text} is none of {}", words.join(", "));
        words.iter().copied().find(|w| *w == text).ok_or_else(|| Error::PassSetting { pass: self.pass.name().into(), problem: problem() })
    }
}

/// What a pass did. Printed at start-up, kept with the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    pub pass: &'static str,
    pub mode: Mode,
    pub applied: usize,
    /// (reason, where).
    pub declined: Vec<(String, String)>,
    pub notes: Vec<String>,
}

impl Receipt {
    pub fn sites(&self) -> usize {
        self.applied + self.declined.len()
    }

    pub fn decline(&mut self, reason: impl Into<String>, site: &str) {
        self.declined.push((reason.into(), if site.is_empty() { "the top level".into() } else { site.into() }));
    }

    /// One line: `12 of 36; 24: K = 48 is not a multiple of 16 (blocks.0.router, ...)`.
    pub fn summary(&self) -> String {
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (reason, site) in &self.declined {
            reasons.entry(reason).or_default().push(site);
        }
        let mut parts: Vec<String> = self.notes.clone();
        for (reason, mut sites) in reasons {
            let count = sites.len();
            sites.dedup();
            let more = if sites.len() > 2 { ", ..." } else { "" };
            parts.push(format!("{count}: {reason} ({}{more})", sites[..sites.len().min(2)].join(", ")));
        }
        parts.join("; ")
    }
}

/// Modes and settings of all passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Switches {
    chosen: BTreeMap<String, (Mode, BTreeMap<String, String>)>,
}

impl Switches {
    /// `value` is `off`, `auto` or `require`, then `,setting=value` any number of times.
    pub fn set(&mut self, pass: &str, value: &str) -> Result<(), Error> {
        let found = PASSES
            .iter()
            .find(|p| p.name() == pass)
            .ok_or_else(|| Error::NoPass { name: pass.into(), hint: known(pass, PASSES.iter().map(|p| p.name())) })?;
        let wrong = |problem: String| Error::PassSetting { pass: pass.into(), problem };
        let mut parts = value.split(',').map(str::trim);
        let mode = match parts.next() {
            Some("off") => Mode::Off,
            Some("auto") => Mode::Auto,
            Some("require") => Mode::Require,
            other => return Err(wrong(format!("'{}' is not off, auto or require", other.unwrap_or_default()))),
        };
        let mut values = BTreeMap::new();
        for part in parts {
            let (name, v) = part.split_once('=').ok_or_else(|| wrong(format!("'{part}' is not setting=value")))?;
            if !found.settings().iter().any(|s| s.name == name) {
                return Err(wrong(format!("has no setting '{name}'{}", known(name, found.settings().iter().map(|s| s.name)))));
            }
            values.insert(name.to_string(), v.to_string());
        }
        self.chosen.insert(pass.into(), (mode, values));
        Ok(())
    }

    pub fn with(mut self, pass: &str, value: &str) -> Result<Switches, Error> {
        self.set(pass, value)?;
        Ok(self)
    }

    pub fn mode(&self, pass: &dyn Pass) -> Mode {
        self.chosen.get(pass.name()).map_or(pass.default_mode(), |c| c.0)
    }
}

/// Runs all passes, then the two steps that every graph needs: composite ops that no pass took are written out, and what an
/// op cannot read in place is copied.
pub fn run(g: &mut Graph, switches: &Switches, target: Target) -> Result<Vec<Receipt>, Error> {
    let mut receipts = vec![];
    let none = BTreeMap::new();
    check_sizes(g)?;
    for pass in PASSES {
        if pass.name() == "bf16" {
            expand::apply(g);
            check_sizes(g)?;
        }
        let mode = switches.mode(*pass);
        let mut receipt = Receipt { pass: pass.name(), mode, applied: 0, declined: vec![], notes: vec![] };
        if mode != Mode::Off {
            let values = switches.chosen.get(pass.name()).map_or(&none, |c| &c.1);
            pass.apply(g, &Settings { target, pass: *pass, values }, &mut receipt)?;
            check_sizes(g)?;
        } else if pass.name() == "autodiff" && g.nodes.iter().any(|n| matches!(n.kind, Kind::Grad)) {
            return Err(Error::NoAutodiff);
        }
        if let (Mode::Require, Some((reason, site))) = (mode, receipt.declined.first()) {
            return Err(Error::Declined { pass: pass.name().into(), site: site.clone(), reason: reason.clone() });
        }
        receipts.push(receipt);
    }
    layout::apply(g);
    Ok(receipts)
}

/// Refuses tensors that no memory holds, by name: before anything forms products of their sizes, or asks for that memory.
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

/// A pass that is required must have applied somewhere in the programs that run together.
pub fn all_applied<'a>(programs: impl Iterator<Item = &'a [Receipt]> + Clone) -> Result<(), Error> {
    for pass in PASSES {
        let mut own = programs.clone().flatten().filter(|r| r.pass == pass.name() && r.mode == Mode::Require).peekable();
        if own.peek().is_some() && own.all(|r| r.applied == 0) {
            return Err(Error::NoSites(pass.name().into()));
        }
    }
    Ok(())
}

/// What may stand in the place of a name that is not known: `; did you mean 'x'? (known: x, y, z)`, the nearest first.
pub fn known<'a>(name: &str, all: impl IntoIterator<Item = &'a str>) -> String {
    let mut all: Vec<&str> = all.into_iter().collect();
    all.sort_by_key(|k| strsim::levenshtein(k, name));
    let near = all
        .first()
        .filter(|k| strsim::levenshtein(k, name) <= 2.max(name.len() / 2))
        .map_or(String::new(), |k| format!("; did you mean '{k}'?"));
    format!("{near} (known: {})", if all.is_empty() { "none".into() } else { all.join(", ") })
}
