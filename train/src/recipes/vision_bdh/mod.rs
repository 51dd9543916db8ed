//! vision_bdh: an image classifier, one Dragon-Hatchling layer applied over and over.

mod model;

pub use model::{VisionBdh, VisionConfig, correct};

use crate::config::Config;
use crate::golden::{Golden, differentiated};
use crate::recipe::{Computed, Recipe, Task, TrainError};
use engine::{DType, Data, Device, Recorder, Switches, Var};
