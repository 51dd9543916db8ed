//! What an evaluation found, and how much of the validation data it read.

use crate::report::Confusion;

/// What the validation data show.
pub struct Evaluation {
    /// Means over the items that count; the first is the loss.
    pub values: Vec<(&'static str, f64)>,
    /// For classifiers.
    pub confusion: Option<Confusion>,
    /// Where items are left out.
    pub counted: Option<Counted>,
}

/// How much of the validation data an evaluation reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extent {
    /// Batches that are read.
    pub batches: u64,
    /// All batches there are; None where the data is generated without end.
    pub of: Option<u64>,
}

impl Extent {
    /// `limit` as `train.eval_batches` has it: 0 is all.
    pub fn new(items: u64, batch: usize, limit: u64, endless: bool) -> Extent {
        let all = items.div_ceil(batch as u64);
        Extent { batches: if limit == 0 { all } else { limit.min(all) }, of: (!endless).then_some(all) }
    }

    /// `8 of 26 batches`, `all 26 batches`, `8 batches of data without an end`
    pub fn line(&self) -> String {
        self.line_of("validation")
    }

    /// The same of another split.
    pub fn line_of(&self, split: &str) -> String {
        let batches = |n: u64| if n == 1 { "1 batch".to_string() } else { format!("{n} batches") };
        match self.of {
            Some(all) if self.batches == all => format!("all of the {split} split, {}", batches(all)),
            Some(all) => format!("{} of {}", self.batches, batches(all)),
            None => format!("{} of generated data, which has no end", batches(self.batches)),
        }
    }
}

/// How many items were evaluated, and how many were not.
pub struct Counted {
    /// What they are: "puzzles".
    pub what: &'static str,
    pub evaluated: usize,
    pub left_out: Vec<LeftOut>,
}

pub struct LeftOut {
    pub key: &'static str,
    pub why: &'static str,
    pub count: usize,
}

impl Counted {
    /// `7 puzzles evaluated, 33 left out: 20 of the training side, 13 beyond data.test_puzzles`
    pub fn line(&self) -> String {
        let reasons: Vec<String> = self.left_out.iter().filter(|l| l.count > 0).map(|l| format!("{} {}", l.count, l.why)).collect();
        let left_out = match self.left_out.iter().map(|l| l.count).sum::<usize>() {
            0 => "none left out".into(),
            n => format!("{n} left out: {}", reasons.join(", ")),
        };
        format!("{} {} evaluated, {left_out}", self.evaluated, self.what)
    }

    pub fn to_json(&self) -> serde_json::Value {
        let left_out = self.left_out.iter().map(|l| (l.key.to_string(), l.count.into())).collect();
        serde_json::json!({ "what": self.what, "evaluated": self.evaluated, "left_out": serde_json::Value::Object(left_out) })
    }
}
