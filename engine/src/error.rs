use crate::meta::Meta;

/// What can go wrong between a recorded graph and its results. Mistakes in model code (shapes) panic where they are made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the loss does not depend on parameter '{0}': use it, or do not ask for its gradient")]
    Unreached(String),
    #[error("a gradient is asked for through '{op}' (in {scope}), which has none: second derivatives are not supported")]
    NotDifferentiable { op: String, scope: String },
    #[error("no pass is called '{name}'{hint}; `kiln passes` says what they do")]
    NoPass { name: String, hint: String },
    #[error("there is an op or a pass '{0}' already: call the new one something else")]
    Twice(String),
    #[error("pass '{pass}': {problem}")]
    PassSetting { pass: String, problem: String },
    #[error("pass '{pass}' is required, but declined {site}: {reason} (use {pass}=auto)")]
    Declined { pass: String, site: String, reason: String },
    #[error("pass '{0}' is required, but found nothing to apply to (use {0}=auto)")]
    NoSites(String),
    #[error("state '{name}' is {have:?}, but {want:?} is wanted")]
    StateShape { name: String, have: Meta, want: Meta },
    #[error("there is no state '{0}'")]
    NoState(String),
    #[error("feed '{name}' wants {want:?}, got {got}")]
    Feed { name: String, want: Meta, got: String },
    #[error("{what} is {meta:?}, which takes more than {} GiB: make the model, the batch or the sequence smaller", .limit >> 30)]
    TooLarge { what: String, meta: Meta, limit: usize },
    #[error("there is no memory for {what}: {} MiB", .bytes >> 20)]
    NoMemory { what: String, bytes: usize },
    #[error("{0}")]
    Cuda(String),
    #[error("the program has no output '{0}'")]
    NoOutput(String),
}
