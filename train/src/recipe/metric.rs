//! What the numbers of a run mean: a recipe declares each of its own once, those that every run has are declared here, and everything that shows
//! a number asks here.

use crate::report::{human_bytes, human_count};

/// A number that training reports or an evaluation finds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    pub name: &'static str,
    pub unit: Unit,
    pub better: Better,
    pub about: &'static str,
    /// The metric that it is the exponential of: evaluation computes it from there.
    pub exp_of: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unit {
    /// From 0 to 1, shown in percent.
    Share,
    /// A cross-entropy with the natural logarithm.
    Nats,
    /// How many of what is named here.
    Count(&'static str),
    Bytes,
    Seconds,
    None,
}

/// Which way a number is to go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Better {
    Higher,
    Lower,
    Neither,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::Share => "share",
            Unit::Nats => "nats",
            Unit::Count(what) => what,
            Unit::Bytes => "bytes",
            Unit::Seconds => "seconds",
            Unit::None => "",
        }
    }
}

impl Better {
    pub fn name(self) -> &'static str {
        match self {
            Better::Higher => "higher",
            Better::Lower => "lower",
            Better::Neither => "neither",
        }
    }

    /// `lower is better`; of what has no direction, nothing.
    pub fn words(self) -> Option<&'static str> {
        match self {
            Better::Higher => Some("higher is better"),
            Better::Lower => Some("lower is better"),
            Better::Neither => None,
        }
    }
}

/// What the optimizer does, in every run that has one, and how far the run is.
const OPTIMIZER: &[Metric] = &[
    Metric::new("grad_norm", Unit::None, Better::Neither, "length of the gradient over all parameters, before it is clipped"),
    Metric::new("clipped_norm", Unit::None, Better::Neither, "length of the gradient after it is clipped: at most train.clip"),
    Metric::new(
        "skipped",
        Unit::Count("steps"),
        Better::Lower,
        "steps so far that changed nothing, because a loss or gradient was not finite",
    ),
    Metric::new("learning_rate", Unit::None, Better::Neither, "the schedule's learning rate at this step"),
    Metric::new("epoch", Unit::Count("epochs"), Better::Neither, "how often the training data was gone through"),
];

/// What the step costs, in every run.
const MACHINE: &[Metric] = &[
    Metric::new("per_second", Unit::None, Better::Higher, "tokens, pictures or examples that training works through in a second"),
    Metric::new("step_ms", Unit::Count("ms"), Better::Lower, "time of a step, without evaluations and saving"),
    Metric::new("phase_ms", Unit::Count("ms"), Better::Lower, "time of one part of a step"),
    Metric::new("data_wait_ms", Unit::Count("ms"), Better::Lower, "how long a step waited for its data"),
    Metric::new(
        "mfu",
        Unit::Share,
        Better::Higher,
        "model FLOPs utilisation: the model's arithmetic, without what is computed twice, over the GPU's dense bf16 peak",
    ),
    Metric::new("slow_steps", Unit::Count("steps"), Better::Lower, "steps so far that took more than twice the median"),
    Metric::new(
        "gpu_utilisation",
        Unit::Count("percent"),
        Better::Higher,
        "share of the time in which the GPU ran any kernel, as NVML says",
    ),
    Metric::new("gpu_watts", Unit::Count("watts"), Better::Neither, "power that the GPU draws, as NVML says"),
    Metric::new("device_allocated_bytes", Unit::Bytes, Better::Lower, "memory of the GPU that kiln has allocated"),
    Metric::new(
        "device_reserved_bytes",
        Unit::Bytes,
        Better::Lower,
        "memory of the GPU that is taken since the run opened it, also by libraries",
    ),
    Metric::new("device_peak_bytes", Unit::Bytes, Better::Lower, "the most memory of the GPU that was taken so far"),
];

/// Which numbers of a metric a key of metrics.jsonl names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Of {
    Training,
    /// `val_NAME`
    Validation,
    /// `epoch_NAME`: the mean over the steps of an epoch.
    Epoch,
}

/// Where a metric comes from: pages show them in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Group {
    Recipe,
    Optimizer,
    Machine,
}

impl Group {
    pub fn name(self) -> &'static str {
        match self {
            Group::Recipe => "What it learns",
            Group::Optimizer => "Optimizer",
            Group::Machine => "Speed and memory",
        }
    }
}

impl Metric {
    pub const fn new(name: &'static str, unit: Unit, better: Better, about: &'static str) -> Metric {
        Metric { name, unit, better, about, exp_of: None }
    }

    /// The perplexity of a metric that is a mean cross-entropy per token, in nats.
    pub const fn perplexity(of: &'static str) -> Metric {
        let about = "exp of the cross-entropy: among how many equally likely tokens the model hesitates";
        Metric { exp_of: Some(of), ..Metric::new("perplexity", Unit::None, Better::Lower, about) }
    }

    /// The loss of every task that says nothing else.
    pub const LOSS: Metric = Metric::new("loss", Unit::Nats, Better::Lower, "cross-entropy of the targets");

    /// What language models say of a token.
    pub const TEXT: &[Metric] =
        &[Metric::new("loss", Unit::Nats, Better::Lower, "cross-entropy of the next token"), Metric::perplexity("loss")];

    /// Those of these metrics that follow from others, of which these are the values.
    pub fn derived(metrics: &[Metric], values: &[(&'static str, f64)]) -> Vec<(&'static str, f64)> {
        let value = |name: &str| values.iter().find(|v| v.0 == name).map(|v| v.1);
        metrics.iter().filter_map(|m| Some((m.name, value(m.exp_of?)?.exp()))).collect()
    }

    /// What is declared of a name.
    pub fn find<'a>(metrics: &'a [Metric], name: &str) -> Option<&'a Metric> {
        metrics.iter().find(|m| m.name == name)
    }

    /// What a key of metrics.jsonl is, with a recipe's metrics and those of every run: `val_loss` is the loss, of validation; `rotor.3` one of the
    /// rotor's numbers.
    pub fn of_key<'a>(metrics: &'a [Metric], key: &str) -> Option<(&'a Metric, Of, Group)> {
        let tables = [(metrics, Group::Recipe), (OPTIMIZER, Group::Optimizer), (MACHINE, Group::Machine)];
        let whole = |name: &str| tables.iter().find_map(|(table, group)| Some((Metric::find(table, name)?, *group)));
        let named = |name: &str| whole(name).or_else(|| whole(name.split_once('.')?.0));
        let parts = [(Some(key), Of::Training), (key.strip_prefix("val_"), Of::Validation), (key.strip_prefix("epoch_"), Of::Epoch)];
        parts.into_iter().find_map(|(name, of)| named(name?).map(|(metric, group)| (metric, of, group)))
    }

    /// A number in its unit: `87.65%`, `1.2345`. One that is not declared is shown as it is.
    pub fn shown(metrics: &[Metric], name: &str, value: f64) -> String {
        match Metric::of_key(metrics, name).map(|m| m.0.unit) {
            Some(Unit::Share) => format!("{:.2}%", 100.0 * value),
            Some(Unit::Bytes) if value >= 0.0 => human_bytes(value as u64),
            _ if name == "per_second" => human_count(value),
            _ if value.abs() >= 1e7 || value != 0.0 && value.abs() < 1e-3 => format!("{value:.3e}"),
            _ => format!("{value:.4}"),
        }
    }

    /// The name with its unit and direction, for an axis: `loss (nats, lower is better)`.
    pub fn label(metrics: &[Metric], name: &str) -> String {
        let Some((metric, ..)) = Metric::of_key(metrics, name) else { return name.into() };
        let parts: Vec<&str> =
            [metric.unit.name()].into_iter().filter(|unit| !unit.is_empty() && *unit != name).chain(metric.better.words()).collect();
        if parts.is_empty() { name.into() } else { format!("{name} ({})", parts.join(", ")) }
    }

    /// `cross-entropy of the next token (lower is better)`
    pub fn words(&self) -> String {
        self.better.words().map_or(self.about.into(), |better| format!("{} ({better})", self.about))
    }

    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({ "unit": self.unit.name(), "better": self.better.name(), "about": self.about })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_lead_to_what_is_declared() {
        let metrics = &[
            Metric::LOSS,
            Metric::new("rotor", Unit::None, Better::Neither, "angles"),
            Metric::new("epoch_x", Unit::Share, Better::Higher, "own"),
        ];
        let of = |key: &str| Metric::of_key(metrics, key).map(|(m, of, group)| (m.name, of, group));
        assert_eq!(of("loss"), Some(("loss", Of::Training, Group::Recipe)));
        assert_eq!(of("val_loss"), Some(("loss", Of::Validation, Group::Recipe)));
        assert_eq!(of("epoch_loss"), Some(("loss", Of::Epoch, Group::Recipe)));
        assert_eq!(of("epoch"), Some(("epoch", Of::Training, Group::Optimizer)));
        assert_eq!(of("epoch_x"), Some(("epoch_x", Of::Training, Group::Recipe)), "a whole name comes first");
        assert_eq!(of("rotor.3"), Some(("rotor", Of::Training, Group::Recipe)));
        assert_eq!(of("device_peak_bytes"), Some(("device_peak_bytes", Of::Training, Group::Machine)));
        assert_eq!([of("los"), of("lossy"), of("val_"), of("")], [None, None, None, None]);
        assert_eq!(Metric::label(metrics, "loss"), "loss (nats, lower is better)");
        assert_eq!((Metric::label(metrics, "rotor.0"), Metric::label(metrics, "other")), ("rotor.0".into(), "other".into()));
        let shown = [("val_epoch_x", 0.5), ("device_peak_bytes", 1024.0), ("per_second", 12345.0), ("loss", 1.5), ("learning_rate", 3e-4)];
        assert_eq!(shown.map(|(n, v)| Metric::shown(metrics, n, v)), ["50.00%", "1.00 KiB", "12.3K", "1.5000", "3.000e-4"]);
    }
}
