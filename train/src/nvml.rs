//! How busy a GPU is and what power it draws, from the driver's management library (NVML), where there is one.

use engine::Device;
use nvml_wrapper::Nvml;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The driver's own figure of utilisation covers about as long.
const EVERY: Duration = Duration::from_millis(500);

/// Sums of readings.
#[derive(Clone, Copy, Default)]
struct Sums {
    readings: f64,
    utilisation: f64,
    watts: f64,
}

impl Sums {
    /// As metrics; none where nothing was read.
    fn means(&self) -> Vec<(String, f64)> {
        let mean = |name: &str, sum: f64| (name.to_string(), sum / engine::mutant!("watts-of-all-readings", self.readings, 1.0));
        if self.readings == 0.0 { vec![] } else { vec![mean("gpu_utilisation", self.utilisation), mean("gpu_watts", self.watts)] }
    }
}

/// A thread that asks twice a second.
pub struct Watch {
    sums: Arc<Mutex<Sums>>,
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// None on a CPU, and where NVML cannot be used: nothing depends on it.
    pub fn start(device: &Device) -> Option<Watch> {
        let bus = device.gpu()?.pci_bus_id()?;
        let library = engine::cuda::nvml(&crate::gpu::folders()).path?;
        let nvml = Nvml::builder().lib_path(library.as_os_str()).init().ok()?;
        nvml.device_by_pci_bus_id(bus.as_str()).ok()?.utilization_rates().ok()?;
        let (sums, (stop, stopped)) = (Arc::<Mutex<Sums>>::default(), channel());
        let shared = sums.clone();
        let work = move || {
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let Ok(card) = nvml.device_by_pci_bus_id(bus.as_str()) else { return };
                if let (Ok(busy), Ok(milliwatts)) = (card.utilization_rates(), card.power_usage()) {
                    let mut s = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    let (utilisation, watts) = (s.utilisation + f64::from(busy.gpu), s.watts + f64::from(milliwatts) / 1e3);
                    *s = Sums { readings: s.readings + 1.0, utilisation, watts };
                }
            }
        };
        let thread = std::thread::Builder::new().name("kiln-nvml".into()).spawn(work).ok()?;
        Some(Watch { sums, stop: Some(stop), thread: Some(thread) })
    }

    /// Means since the last call, as metrics; none where nothing was read since.
    pub fn metrics(&self) -> Vec<(String, f64)> {
        let s = std::mem::take(&mut *self.sums.lock().unwrap_or_else(PoisonError::into_inner));
        s.means()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_become_means() {
        let sums = Sums { readings: 4.0, utilisation: 200.0, watts: 1400.0 };
        assert_eq!(sums.means(), [("gpu_utilisation".to_string(), 50.0), ("gpu_watts".to_string(), 350.0)]);
        assert!(Sums::default().means().is_empty(), "no reading is no number");
    }
}
