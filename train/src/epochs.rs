//! Epochs: after which step one ends, and what training reported in it.

use serde_json::{Map, Value};

/// A set of `items`, of which each step takes `step_items`, one epoch after another without a break.
pub struct Epochs {
    items: u64,
    step_items: u64,
    log_every: u64,
    /// (step, values) of the epoch that is under way.
    reports: Vec<(u64, Vec<(String, f64)>)>,
}

impl Epochs {
    pub fn new(items: u64, step_items: u64, log_every: u64) -> Epochs {
        Epochs { items, step_items, log_every, reports: vec![] }
    }

    /// Epochs that are whole after this many steps.
    fn whole(&self, steps: u64) -> u64 {
        (steps as u128 * self.step_items as u128 / self.items as u128) as u64
    }

    /// Whether this step takes the last item of an epoch; it may begin the next as well.
    pub fn ends(&self, step: u64) -> bool {
        self.whole(step) > self.whole(step - 1)
    }

    pub fn after(&self, steps: u64) -> f64 {
        steps as f64 * self.step_items as f64 / self.items as f64
    }

    /// "3" where a step ends the third epoch, "3.25" a quarter of an epoch later.
    pub fn shown(&self, step: u64) -> String {
        if self.ends(step) { self.whole(step).to_string() } else { format!("{:.2}", self.after(step)) }
    }

    /// What a run that is resumed after `start` steps has written down.
    pub fn recall(&mut self, records: &[Map<String, Value>], start: u64) {
        for record in records {
            if let Some(step) = record["step"]
                .as_u64()
                .filter(|step| (1..=engine::mutant!("epochs-recall-what-comes-later", start, u64::MAX)).contains(step))
            {
                self.add(step, record.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))));
            }
        }
    }

    /// What a step reported.
    pub fn add(&mut self, step: u64, values: impl IntoIterator<Item = (String, f64)>) {
        if self.reports.last().is_some_and(|(last, _)| self.whole(last - 1) != self.whole(step - 1)) {
            self.reports.clear();
        }
        self.reports.push((step, values.into_iter().collect()));
    }

    /// The mean of a value over the epoch, of the steps that are logged and of the last. Steps that are reported because a run stopped
    /// there are left out, so that a resumed run finds the same.
    pub fn mean(&self, name: &str) -> Option<f64> {
        let last = self.reports.last()?.0;
        let counted = self.reports.iter().filter(|(step, _)| step.is_multiple_of(self.log_every) || *step == last);
        let found = counted.flat_map(|(_, values)| values).filter(|(n, v)| n == name && v.is_finite());
        let (sum, n) = found.fold((0.0, 0), |(sum, n), (_, v)| (sum + v, n + 1));
        (n > 0).then(|| sum / n as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_ends_with_its_last_item() {
        let e = Epochs::new(10, 4, 1);
        let ends: Vec<u64> = (1..=10).filter(|&s| e.ends(s)).collect();
        assert_eq!(ends, [3, 5, 8, 10], "items 10, 20, 30 and 40");
        assert_eq!((e.shown(3), e.shown(4), e.shown(5), e.after(5)), ("1".into(), "1.60".into(), "2".into(), 2.0));
        let small = Epochs::new(3, 4, 1);
        assert!((1..=10).all(|s| small.ends(s)));
        assert_eq!(small.shown(3), "4");
        assert!(!Epochs::new(1 << 60, 1 << 40, 1).ends(1 << 19), "no overflow");
    }

    #[test]
    fn means_are_those_of_one_epoch_however_often_it_was_stopped() {
        let one = |v: f64| [("loss".to_string(), v)];
        let mut whole = Epochs::new(20, 2, 2);
        let mut stopped = Epochs::new(20, 2, 2);
        for step in (2..=14).step_by(2) {
            whole.add(step, one(step as f64));
        }
        for step in [12, 13, 14] {
            stopped.add(step, one(step as f64));
        }
        assert_eq!(whole.mean("loss"), Some(13.0), "steps 12 and 14 of the second epoch");
        assert_eq!(whole.mean("loss"), stopped.mean("loss"));
        // What was recorded behind the checkpoint that a run goes on from is computed anew, and may be other.
        let record = |step: u64| serde_json::json!({ "step": step, "loss": step }).as_object().unwrap().clone();
        let mut back = Epochs::new(20, 2, 1);
        back.recall(&(1..=6).map(record).collect::<Vec<_>>(), 4);
        assert_eq!(back.mean("loss"), Some(2.5), "steps 1 to 4");
        [5, 6].iter().for_each(|step| back.add(*step, one(100.0)));
        assert_eq!(back.mean("loss"), Some(35.0));
        stopped.add(15, one(f64::NAN));
        assert_eq!((stopped.mean("loss"), stopped.mean("accuracy")), (Some(13.0), None));
    }
}
