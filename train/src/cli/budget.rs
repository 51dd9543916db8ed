//! `--memory-budget`, for the commands that plan or train a recipe.

use crate::config::Config;
use crate::memory;
use crate::recipe::{Recipe, Task};
use crate::run::{self, Fitted, Limits, SAVING, fit};
use anyhow::{Result, bail};
use clap::Args;
use engine::Device;
use engine::passes::Target;

#[derive(Args, Clone, Default)]
pub struct BudgetArgs {
    /// Chooses what to recompute and how to split the batch so that the planned memory stays within this size (8GiB, 8000MB, 8g), with the least
    /// added time
    #[arg(long, value_name = "SIZE")]
    memory_budget: Option<String>,
    /// A pass that rounds more (adam8bit or bf16), which --memory-budget may switch on if the run does not fit as it is (repeatable)
    #[arg(long, value_name = "PASS", requires = "memory_budget")]
    allow: Vec<String>,
}

impl BudgetArgs {
    pub fn is_given(&self) -> bool {
        self.memory_budget.is_some()
    }

    /// Notes the budget in a config. What a former budget chose for a run that goes on is taken back.
    pub fn set(&self, config: &mut Config) -> Result<()> {
        config.undo_budget(self.is_given());
        if let Some(size) = &self.memory_budget {
            memory::size(size).map_err(|problem| anyhow::anyhow!("--memory-budget: {problem}"))?;
            config.set_value("memory_budget", size.clone().into())?;
        }
        Ok(())
    }

    /// The config with what the budget makes necessary. `split`: the batch too may be changed.
    pub fn fit(&self, recipe: &dyn Recipe, config: Config, on: &Where, split: bool) -> Result<(Config, Option<Fitted>)> {
        for pass in &self.allow {
            engine::Switches::default().set(pass, "auto")?;
            if !SAVING.contains(&&**pass) {
                bail!(
                    "--allow {pass}: --memory-budget has no use for it; it takes {} (--pass {pass}=auto switches it on)",
                    SAVING.join(" or ")
                );
            }
        }
        let fitted = fit(recipe, &config, &Limits { target: on.target, free: on.free, allowed: &self.allow, split })?;
        Ok(match fitted {
            None => (config, None),
            Some(fitted) => (fitted.config.clone(), Some(fitted)),
        })
    }
}

/// The config of a task with what has to be recomputed for it to fit into the device's memory; and what that was, where it is more than usual.
pub fn fit_device(task: &dyn Task, config: Config, on: &Where) -> Result<(Config, Option<Fitted>)> {
    let limits = Limits { target: on.target, free: on.free, allowed: &[], split: false };
    Ok(match run::fit_device(task, &config, &limits)? {
        None => (config, None),
        Some(fitted) => (fitted.config.clone(), Some(fitted).filter(|f| !f.changes.is_empty())),
    })
}

/// Where a run will be.
pub struct Where {
    pub target: Target,
    /// Bytes that are free there, if that is known.
    pub free: Option<u64>,
}

impl Where {
    pub fn here(device: &Device) -> Where {
        Where { target: device.target(), free: memory::available(device) }
    }
}
