//! The learning rate of a step.

use crate::config::TrainConfig;

/// Steps are counted from 0. The rate rises linearly over `warmup` steps, then follows the schedule to its end, and stays there.
pub fn rate(c: &TrainConfig, step: u64) -> f64 {
    let horizon = engine::mutant!("schedule-ends-with-the-steps", c.schedule_steps(), c.steps).max(1) as f64;
    let (t, warmup) = (step as f64, c.warmup as f64);
    if t < warmup {
        return c.learning_rate * engine::mutant!("warmup-from-zero", t + 1.0, t) / warmup;
    }
    // Progress: 0 at the end of the warm-up, 1 at the horizon.
    let share = |from: f64| ((t - from) / (horizon - from).max(1.0)).clamp(0.0, 1.0);
    let fall = match c.schedule.as_str() {
        "cosine" => 0.5 * (1.0 + (std::f64::consts::PI * share(warmup)).cos()),
        "wsd" => 1.0 - share(engine::mutant!("decay-begins-in-the-warm-up", warmup, 0.0f64).max(horizon * (1.0 - c.decay_share))),
        _ => 1.0,
    };
    c.learning_rate * (c.final_rate + (1.0 - c.final_rate) * fall)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(schedule: &str) -> TrainConfig {
        TrainConfig { steps: 100, horizon: 100, learning_rate: 2.0, schedule: schedule.into(), warmup: 10, ..TrainConfig::default() }
    }

    #[test]
    fn shapes() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        for s in ["cosine", "wsd", "constant"] {
            let c = config(s);
            assert!(near(rate(&c, 0), 0.2) && near(rate(&c, 9), 2.0), "warm-up of {s}");
        }
        let (c, w) = (config("cosine"), config("wsd"));
        assert!(near(rate(&c, 55), 2.0 * (0.1 + 0.9 * 0.5)) && near(rate(&c, 100), 0.2) && near(rate(&c, 500), 0.2));
        assert!(near(rate(&w, 79), 2.0) && near(rate(&w, 90), 2.0 * (0.1 + 0.9 * 0.5)) && near(rate(&w, 100), 0.2));
        assert!(near(rate(&config("constant"), 99), 2.0));
        // What falls begins to fall behind the warm-up.
        let long = TrainConfig { warmup: 90, decay_share: 0.5, ..config("wsd") };
        assert!(near(rate(&long, 90), 2.0) && near(rate(&long, 95), 2.0 * (0.1 + 0.9 * 0.5)) && near(rate(&long, 100), 0.2));
    }

    #[test]
    fn the_schedule_spans_the_horizon_and_not_the_steps() {
        let span = |steps: u64, horizon: u64, step: u64| rate(&TrainConfig { steps, horizon, warmup: 0, ..config("cosine") }, step);
        assert_eq!(span(10, 100, 9), span(100, 100, 9));
        assert!(span(10, 100, 9) > span(10, 10, 9));
        // More steps than the schedule has go on at its last rate.
        assert_eq!(span(100, 10, 50), span(10, 10, 10));
        // Without a horizon it is as long as the run.
        assert_eq!(span(10, 0, 9), span(10, 10, 9));
    }
}
