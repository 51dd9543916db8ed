//! Steps that changed nothing, because their loss or gradient was not finite: what is shown of them while they happen, and what a run that ends with them says.

use crate::recipe::{Bad, Step, TrainError};

/// So many are shown one by one; after them the tenth, the hundredth and so on.
const ONE_BY_ONE: u64 = 3;

pub struct Skips {
    /// How many steps the run had skipped by its last report, where it counts them.
    total: u64,
    /// Reports of skipped steps.
    seen: u64,
    row: Option<Row>,
}

/// Skipped steps in a row, up to the last report.
pub struct Row {
    pub skipped: u64,
    pub last: u64,
    first: Bad,
    /// Of the last of them: then its gradient alone is not.
    pub loss_is_finite: bool,
}

impl Row {
    pub fn error(&self) -> TrainError {
        TrainError::NotFinite { skipped: self.skipped, last: self.last, first: self.first.clone() }
    }
}

impl Skips {
    /// `before`: steps that the run had skipped before this process.
    pub fn new(before: u64) -> Skips {
        Skips { total: before, seen: 0, row: None }
    }

    /// Skipped steps in a row that end with this one.
    pub fn up_to(&self, step: u64) -> Option<&Row> {
        self.row.as_ref().filter(|row| row.last == step)
    }

    /// Takes in the report of a step; a line for the screen, of some of those that were skipped.
    pub fn take(&mut self, at: u64, report: &Step) -> Option<String> {
        let total = report.values.iter().find(|(name, _)| name == "skipped").map(|v| v.1 as u64);
        let more = total.map_or(0, |total| total.saturating_sub(std::mem::replace(&mut self.total, total)));
        let loss_is_finite = report.values.first().is_none_or(|(_, loss)| loss.is_finite());
        if report.skipped_in_row == 0 && loss_is_finite {
            self.row = None;
            // Where reports are far apart, it may have happened in between.
            return self.is_shown(more > 0).then(|| {
                format!("skipped {more} of the steps before step {at}: their loss or gradient was not finite, so they changed nothing")
            });
        }
        let skipped = report.skipped_in_row.max(1);
        let named = report.values.iter().find(|(_, value)| !value.is_finite());
        let (name, value) = named.map_or(("the gradient", f64::NAN), |(name, value)| (name.as_str(), *value));
        let before = self
            .row
            .take()
            .filter(|row| engine::mutant!("two-rows-of-skipped-steps-are-one", row.skipped + (at - row.last) == skipped, true));
        let first = before.map_or_else(|| Bad { step: at, name: name.into(), value }, |row| row.first);
        self.row = Some(Row { skipped, last: at, first, loss_is_finite });
        let so_far = if self.total > 1 { format!("; {} steps were skipped so far", self.total) } else { String::new() };
        self.is_shown(true).then(|| format!("step {at} is skipped and changes nothing: its {name} is {value}{so_far}"))
    }

    fn is_shown(&mut self, happened: bool) -> bool {
        self.seen += u64::from(happened);
        happened && (self.seen <= ONE_BY_ONE || 10u64.pow(self.seen.ilog10()) == self.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(loss: f64, norm: f64, skipped: u64, in_row: u64) -> Step {
        let values = [("loss", loss), ("grad_norm", norm), ("skipped", skipped as f64)].map(|(name, v)| (name.to_string(), v));
        Step { values: values.into(), skipped_in_row: in_row }
    }

    #[test]
    fn a_row_of_skipped_steps_names_its_first_bad_value() {
        let mut skips = Skips::new(0);
        assert_eq!(skips.take(1, &report(2.0, 1.0, 0, 0)), None);
        let said = skips.take(2, &report(2.0, f64::INFINITY, 1, 1)).unwrap();
        assert!(said.starts_with("step 2 ") && said.contains("its grad_norm is inf") && !said.contains("so far"), "{said}");
        assert!(skips.up_to(2).unwrap().loss_is_finite);
        let said = skips.take(3, &report(f64::NAN, f64::NAN, 2, 2)).unwrap();
        assert!(said.contains("its loss is NaN") && said.contains("2 steps were skipped so far"), "{said}");
        assert!(skips.up_to(2).is_none() && !skips.up_to(3).unwrap().loss_is_finite);
        let said = skips.up_to(3).unwrap().error().to_string();
        assert!(
            ["2 steps in a row", "the last at step 3", "grad_norm is inf at step 2", "weights are those of step 1"]
                .iter()
                .all(|p| said.contains(p)),
            "{said}"
        );
        // It is over, and another one begins.
        skips.take(4, &report(2.0, 1.0, 2, 0));
        assert!(skips.up_to(4).is_none() && skips.up_to(3).is_none());
        skips.take(5, &report(f64::INFINITY, 1.0, 3, 1));
        let said = skips.up_to(5).unwrap().error().to_string();
        assert!(said.contains("the last step had") && said.contains("loss is inf at step 5"), "{said}");
    }

    #[test]
    fn the_first_skipped_steps_are_shown_and_then_ever_fewer() {
        let mut skips = Skips::new(0);
        let shown: Vec<u64> = (1..=1000).filter(|&i| skips.take(i, &report(f64::NAN, 1.0, i, i)).is_some()).collect();
        assert_eq!(shown, [1, 2, 3, 10, 100, 1000]);
    }

    /// On a GPU a report is read every so many steps; a resumed run has skipped some before.
    #[test]
    fn steps_that_were_skipped_between_reports_are_counted() {
        let mut skips = Skips::new(4);
        assert_eq!(skips.take(10, &report(2.0, 1.0, 4, 0)), None);
        let said = skips.take(20, &report(2.0, 1.0, 7, 0)).unwrap();
        assert!(said.contains("skipped 3 of the steps before step 20"), "{said}");
        assert_eq!(skips.take(30, &report(2.0, 1.0, 7, 0)), None);
    }

    /// Where reports are far apart, a row may have ended and another begun since the last one.
    #[test]
    fn a_row_that_began_since_the_last_report_is_another() {
        let mut skips = Skips::new(0);
        skips.take(10, &report(f64::NAN, 1.0, 3, 3));
        skips.take(20, &report(f64::INFINITY, 1.0, 5, 2));
        let said = skips.up_to(20).unwrap().error().to_string();
        assert!(said.contains("2 steps in a row") && said.contains("loss is inf at step 20"), "{said}");
    }
}
