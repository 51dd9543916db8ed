//! Errors of the engine.

use crate::meta::Meta;

/// What can go wrong between recording a graph and reading its results. Shapes that do not fit are mistakes in model code, and panic where they
/// are recorded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // fields of variants: each message shows them
pub enum Error {
    /// A gradient with respect to a parameter that the loss does not depend on.
    #[error("the loss does not depend on parameter '{0}': use it, or do not ask for its gradient")]
    Unreached(String),
    /// Differentiation reached an op without a gradient, such as the gradient of another op.
    #[error("a gradient is asked for through '{op}' (in {scope}), which has none: second derivatives are not supported")]
    NotDifferentiable { op: String, scope: String },
    /// A switch of a name that neither a pass nor an executor setting has.
    #[error("no pass is called '{name}'{hint} (`kiln passes` lists them all)")]
    NoPass { name: String, hint: String },
    /// A preset of switches that does not exist.
    #[error("no preset of passes is called '{name}'{hint}; `kiln passes --optimize reordered` shows what one of them switches")]
    NoPreset { name: String, hint: String },
    /// Registering an extension whose op or pass has the name of another.
    #[error("an op or a pass called '{0}' exists already: give the new one another name")]
    Twice(String),
    /// A mode or a setting that the pass does not have, or of the wrong form.
    #[error("pass '{pass}': {problem}")]
    PassSetting { pass: String, problem: String },
    /// A pass of mode `require` could not be applied at one place.
    #[error("pass '{pass}' is required, but declined {site}: {reason} (use {pass}=auto)")]
    Declined { pass: String, site: String, reason: String },
    /// A pass of mode `require` found nothing to apply to in all programs of a run.
    #[error("pass '{0}' is required, but found nothing to apply to (use {0}=auto)")]
    NoSites(String),
    /// A state in the store has another shape or type than a program was compiled for.
    #[error("state '{name}' is {have:?}, but {want:?} is needed")]
    StateShape { name: String, have: Meta, want: Meta },
    /// No state of this name is in the store.
    #[error("there is no state '{0}'")]
    NoState(String),
    /// A run was given data of another shape or type for a feed, or none.
    #[error("feed '{name}' needs {want:?}, got {got}")]
    Feed { name: String, want: Meta, got: String },
    /// A tensor of a graph is larger than any memory.
    #[error("{what} is {meta:?}, which takes more than {} GiB: make the model, the batch or the sequence smaller", .limit >> 30)]
    TooLarge { what: String, meta: Meta, limit: usize },
    /// The host has no memory for something.
    #[error("out of memory: {what} needs {} MiB", .bytes >> 20)]
    NoMemory { what: String, bytes: usize },
    /// A failure of the GPU, its driver or libraries.
    #[error("{0}")]
    Cuda(String),
    /// Ranks that train together cannot go on.
    #[error("several ranks: {0}")]
    Ranks(String),
    /// A plan of memory that does not fit together: an op says of its memory what is not so.
    #[error("the plan of the program's memory is not sound: {0}")]
    Plan(String),
    /// Reading an output that the program does not have.
    #[error("the program has no output '{0}'")]
    NoOutput(String),
}
