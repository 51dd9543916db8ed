//! What the numbers of a run mean: a recipe declares each once, and everything that shows one asks here.

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

    /// A number in its unit: `87.65%`, `1.2345`. One that is not declared is shown as it is.
    pub fn shown(metrics: &[Metric], name: &str, value: f64) -> String {
        match Metric::find(metrics, name).map(|m| m.unit) {
            Some(Unit::Share) => format!("{:.2}%", 100.0 * value),
            _ if value.abs() >= 1e7 => format!("{value:.3e}"),
            _ => format!("{value:.4}"),
        }
    }

    /// The name with its unit, for an axis: `loss (nats)`.
    pub fn label(metrics: &[Metric], name: &str) -> String {
        match Metric::find(metrics, name).map_or("", |m| m.unit.name()) {
            "" => name.into(),
            unit => format!("{name} ({unit})"),
        }
    }

    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({ "unit": self.unit.name(), "better": self.better.name(), "about": self.about })
    }
}
