//! Passes that `--memory-budget`, or the device's memory, set, apart from those that a run has of its own: another budget or device chooses them anew.

use super::{Config, Value};

/// The key that keeps how they were before, `recompute` or `recompute=auto,what=siblings`, with a blank between two.
const BEFORE: &str = "before_budget";

/// Passes that a budget sets and that leave the numbers of a run as they are. Others, `adam8bit` and `bf16`, are part of what it computes, and stay.
const FREE: [&str; 2] = ["recompute", "offload"];

impl Config {
    /// What a pass is set to, by a preset, a run or somebody.
    pub fn pass(&self, name: &str) -> Option<&Value> {
        self.table.get("passes")?.get(name)
    }

    /// Notes the passes that a budget changed, and how they were `before` it.
    pub fn note_budget(&mut self, before: &Config) {
        let changed = FREE.into_iter().filter(|name| self.pass(name) != before.pass(name));
        let word = |name: &str| before.pass(name).and_then(Value::as_str).map_or(name.to_string(), |value| format!("{name}={value}"));
        let words: Vec<String> = changed.map(word).collect();
        self.table.insert(BEFORE.into(), words.join(" ").into());
    }

    /// The passes that a former budget changed are the run's own again, where `anew` says so; those that someone has set since then stay what they are.
    pub fn undo_budget(&mut self, anew: bool) {
        let before = self.text(BEFORE).to_string();
        let (given, open): (Vec<&str>, Vec<&str>) =
            before.split_whitespace().partition(|word| self.is_given(&format!("passes.{}", word.split('=').next().unwrap_or(word))));
        let left = if anew { vec![] } else { open.clone() };
        if !given.is_empty() || anew {
            self.table.insert(BEFORE.into(), left.join(" ").into());
        }
        let passes = self.table.get_mut("passes").and_then(Value::as_table_mut).expect("every config has it");
        for word in open.into_iter().filter(|_| anew) {
            match word.split_once('=') {
                Some((name, value)) => passes.insert(name.into(), value.into()),
                None => passes.remove(word),
            };
        }
    }
}
