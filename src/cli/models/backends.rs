//! `mlx backends`: lists the devices on which models can run here.

use std::sync::Arc;

use inference::Backend;
use serde::Serialize;
use serde_json::json;

use crate::cli::options::load::GPUS;
use crate::cli::terminal::console::{Console, table};
use crate::cli::terminal::failure::Failure;

/// List the backends: which are available, on which device, and their capabilities
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
    /// Measure matrix products on the CPU and on the GPU, to find the size from which the GPU is
    /// faster
    #[arg(long)]
    calibrate: bool,
}

/// The choice of a device for matrix products.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct Products {
    /// Minimum FLOPs of a product that runs on the GPU.
    flop_threshold: u64,
    /// The measured products.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    calibration: Vec<Timed>,
}

/// A product of `[m, k]` and `[k, n]` on both devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Timed {
    m: i32,
    n: i32,
    k: i32,
    flops: u64,
    cpu_seconds: f64,
    gpu_seconds: f64,
}

impl Products {
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.calibration.is_empty() {
            let mut rows = vec![
                ["PRODUCT", "FLOPS", "CPU", "GPU"]
                    .map(String::from)
                    .to_vec(),
            ];
            rows.extend(self.calibration.iter().map(|timed| {
                let micros = |seconds: f64| format!("{:.1} us", seconds * 1e6);
                let Timed { m, n, k, .. } = timed;
                vec![
                    format!("{m} x {k} x {n}"),
                    timed.flops.to_string(),
                    micros(timed.cpu_seconds),
                    micros(timed.gpu_seconds),
                ]
            }));
            lines.extend(table(&rows));
        }
        lines.push(match self.flop_threshold {
            u64::MAX => String::from("products of matrices: the CPU is faster at all sizes"),
            n => format!("products of matrices: on the GPU from {n} FLOPs"),
        });
        lines
    }
}

/// The choice of a device for products on this machine; `None` without a GPU.
#[cfg(feature = "mlx-backend")]
fn products(calibrate: bool) -> Result<Option<Products>, Failure> {
    use mlx_rs_core::Device;
    use mlx_rs_core::dispatch::{CpuBackend, GpuBackend, HybridBackend};

    if !Device::gpu().is_available() {
        return Ok(None);
    }
    let failed = |e: mlx_rs_core::Error| Failure::failed(e.to_string());
    let (cpu, gpu) = (CpuBackend::new(), GpuBackend::new());
    let hybrid = HybridBackend::new(cpu.map_err(failed)?, gpu.map_err(failed)?);
    let hybrid = hybrid.map_err(failed)?;
    let mut products = Products::default();
    if calibrate {
        let measured = hybrid.calibrate().map_err(failed)?;
        products.calibration = (measured.points.iter())
            .map(|point| Timed {
                m: point.shape.0,
                n: point.shape.1,
                k: point.shape.2,
                flops: point.flops,
                cpu_seconds: point.cpu.as_secs_f64(),
                gpu_seconds: point.gpu.as_secs_f64(),
            })
            .collect();
    }
    products.flop_threshold = hybrid.flop_threshold();
    Ok(Some(products))
}

/// A program without MLX computes no products.
#[cfg(not(feature = "mlx-backend"))]
fn products(_calibrate: bool) -> Result<Option<Products>, Failure> {
    Ok(None)
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let default = inference::default_backend().ok();
    let default = default.as_ref().map(|backend| backend.name());
    let products = products(args.calibrate)?;
    if args.calibrate && products.is_none() {
        console.note("there is no GPU here: products of matrices are done on the CPU");
    }
    let facts = (default, products.as_ref());
    print(&inference::backends(), facts, args.json, console)?;
    #[cfg(feature = "mlx-backend")]
    if let Some(hint) = crate::cli::models::standalone::hint() {
        console.warn(hint);
        if console.verbose {
            for place in mlx_rs_core::library::searched() {
                console.warn(&format!("searched {place}"));
            }
        }
    }
    Ok(())
}

fn print(
    backends: &[Arc<dyn Backend>],
    (default, products): (Option<&str>, Option<&Products>),
    as_json: bool,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    if as_json {
        let value = |backend: &Arc<dyn Backend>| {
            let available = inference::availability(backend.as_ref());
            // The products matter only for a GPU backend that works here.
            let on_gpu = available.is_ok() && GPUS.contains(&backend.name());
            let products = products.filter(|_| on_gpu);
            json!({
                "name": backend.name(),
                "available": available.is_ok(),
                "default": default == Some(backend.name()),
                "device": backend.device(),
                "capabilities": backend.capabilities(),
                "reason": available.err(),
                "flop_threshold": products.map(|p| p.flop_threshold),
                "calibration": products.map(|p| &p.calibration).filter(|all| !all.is_empty()),
            })
        };
        let values: Vec<_> = backends.iter().map(value).collect();
        return console.json(&values);
    }
    if backends.is_empty() {
        console.warn("no backend is built into this program");
        return Ok(());
    }
    let mut rows = vec![
        ["NAME", "AVAILABLE", "DEVICE", "CAPABILITIES"]
            .map(String::from)
            .to_vec(),
    ];
    // Backends of one library often fail for the same reason.
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for backend in backends {
        let available = inference::availability(backend.as_ref());
        let mark = if default == Some(backend.name()) {
            " (default)"
        } else {
            ""
        };
        rows.push(vec![
            format!("{}{mark}", backend.name()),
            if available.is_ok() { "yes" } else { "no" }.into(),
            backend.device(),
            backend.capabilities().names().join(" "),
        ]);
        if let Err(reason) = available {
            match reasons.iter_mut().find(|(told, _)| *told == reason) {
                Some((_, names)) => names.push(backend.name()),
                None => reasons.push((reason, vec![backend.name()])),
            }
        }
    }
    console.rows(&rows)?;
    if !reasons.is_empty() {
        console.line("")?;
    }
    for (reason, names) in reasons {
        let verb = if names.len() == 1 { "is" } else { "are" };
        console.wrapped_line(&format!(
            "{} {verb} not available: {reason}",
            names.join(", ")
        ))?;
    }
    if let Some(products) = products {
        console.line("")?;
        for line in products.lines() {
            console.line(&line)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::{self, Streams};

    fn both() -> Vec<Arc<dyn Backend>> {
        let cpu = mock::backend("cpu", None);
        let metal = mock::backend("metal", Some("no Apple silicon here"));
        vec![Arc::new(cpu), Arc::new(metal)]
    }

    #[test]
    fn the_table_says_what_is_available_and_why_not() {
        let mut streams = Streams::new("");
        print(&both(), (Some("cpu"), None), false, &mut streams.console()).unwrap();
        let out = streams.out();
        let lines: Vec<&str> = out.lines().collect();
        assert!(lines[1].starts_with("cpu (default)  yes"), "{out}");
        assert!(lines[1].contains("streaming"), "{out}");
        assert!(
            lines[2].starts_with("metal          no   ") && lines[2].ends_with("streaming"),
            "{out}"
        );
        assert_eq!(lines[3], "", "{out}");
        assert_eq!(lines[4], "metal is not available: no Apple silicon here");
        assert_eq!(lines.len(), 5);

        let backend =
            |name| -> Arc<dyn Backend> { Arc::new(mock::backend(name, Some("no library"))) };
        let all = [backend("cpu"), backend("metal")];
        let mut streams = Streams::new("");
        print(&all, (None, None), false, &mut streams.console()).unwrap();
        let out = streams.out();
        assert!(
            out.ends_with("\ncpu, metal are not available: no library\n"),
            "{out}"
        );
    }

    #[test]
    fn json_has_the_same_facts() {
        let mut streams = Streams::new("");
        print(&both(), (Some("cpu"), None), true, &mut streams.console()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&streams.out()).unwrap();
        assert_eq!(value[0]["name"], "cpu");
        assert_eq!(value[0]["default"], true);
        assert_eq!(value[0]["capabilities"]["streaming"], true);
        assert_eq!(value[1]["available"], false);
        assert_eq!(value[1]["reason"], "no Apple silicon here");
        assert!(value[1]["flop_threshold"].is_null());
    }

    #[test]
    fn the_border_of_products_is_a_fact_of_the_gpu() {
        let timed = Timed {
            m: 6,
            n: 512,
            k: 2560,
            flops: 15_728_640,
            cpu_seconds: 2e-5,
            gpu_seconds: 1.5e-5,
        };
        let products = Products {
            flop_threshold: 15_728_640,
            calibration: vec![timed],
        };
        let backend = |name| -> Arc<dyn Backend> { Arc::new(mock::backend(name, None)) };
        let both = [backend("cpu"), backend("cuda")];
        let mut streams = Streams::new("");
        let facts = (Some("cuda"), Some(&products));
        print(&both, facts, true, &mut streams.console()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&streams.out()).unwrap();
        assert!(value[0]["flop_threshold"].is_null());
        assert_eq!(value[1]["flop_threshold"], 15_728_640);
        assert_eq!(value[1]["calibration"][0]["gpu_seconds"], 1.5e-5);
        let mut streams = Streams::new("");
        print(&both, facts, false, &mut streams.console()).unwrap();
        let out = streams.out();
        assert!(
            out.contains("6 x 2560 x 512  15728640  20.0 us  15.0 us"),
            "{out}"
        );
        assert!(out.ends_with("on the GPU from 15728640 FLOPs\n"), "{out}");
        let never = Products {
            flop_threshold: u64::MAX,
            ..Products::default()
        };
        assert_eq!(never.lines().len(), 1);
        assert!(never.lines()[0].contains("the CPU is faster"));
    }

    #[test]
    fn none_at_all_is_said() {
        let mut streams = Streams::new("");
        print(&[], (None, None), false, &mut streams.console()).unwrap();
        assert!(streams.err().contains("no backend"));
        assert_eq!(streams.out(), "");
        print(&[], (None, None), true, &mut streams.console()).unwrap();
        assert_eq!(streams.out(), "[]\n");
    }
}
