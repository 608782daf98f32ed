//! Environment variables that the engine reads. The engine ignores an invalid value silently, so it
//! is reported here.

use rust_mlx::mlx::cpu::PrefillInputs;

use crate::cli::terminal::failure::Failure;

/// The accepted values of `MLX_CPU_KERNELS`: words that disable kernels, words that enable them,
/// and names of instruction sets.
const OFF: [&str; 4] = ["off", "0", "false", "no"];
const ON: [&str; 4] = ["on", "1", "true", "yes"];
const SETS: [&str; 6] = ["portable", "avx2", "avx512", "amx", "neon", "neon+dotprod"];

/// Checks the variables of the engine.
///
/// # Errors
/// [`Failure::Usage`] with the variable's name, its value and the accepted values.
pub fn check() -> Result<(), Failure> {
    if let Some(value) = variable("MLX_NUM_THREADS")? {
        threads(&value)?;
    }
    if let Some(value) = variable("MLX_CPU_PROMPTS")? {
        prompts(&value)?;
    }
    if let Some(value) = variable("MLX_CPU_KERNELS")? {
        kernels(&value)?;
        let used = rust_mlx::mlx::cpu::instruction_set();
        if SETS.iter().any(|set| set.eq_ignore_ascii_case(&value))
            && !used.eq_ignore_ascii_case(&value)
        {
            tracing::warn!(
                "MLX_CPU_KERNELS is {value}, which this processor does not have; it runs {used}"
            );
        }
    }
    Ok(())
}

/// The value of a variable; `None` if the variable is unset or empty.
fn variable(name: &str) -> Result<Option<String>, Failure> {
    match std::env::var(name) {
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) => Ok(Some(value)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(e) => Err(Failure::usage(format!("{name}: {e}"))),
    }
}

fn threads(value: &str) -> Result<(), Failure> {
    match value.trim().parse::<usize>() {
        Ok(n) if n > 0 => Ok(()),
        _ => Err(Failure::usage(format!(
            "MLX_NUM_THREADS is {value:?}; it must be a number of threads, 1 or more"
        ))),
    }
}

fn prompts(value: &str) -> Result<(), Failure> {
    if PrefillInputs::named(value).is_some() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "MLX_CPU_PROMPTS is {value:?}; it may be {}",
        PrefillInputs::ALL.map(PrefillInputs::name).join(", ")
    )))
}

fn kernels(value: &str) -> Result<(), Failure> {
    let known = [&OFF[..], &ON, &SETS].concat();
    if known.iter().any(|name| name.eq_ignore_ascii_case(value)) {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "MLX_CPU_KERNELS is {value:?}; it may be on, off, {}",
        SETS.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_nothing_is_told() {
        for good in ["1", "16", " 2 "] {
            threads(good).unwrap();
        }
        for bad in ["0", "-1", "abc", "1.5", " "] {
            assert_eq!(threads(bad).unwrap_err().exit_code(), 2, "{bad:?}");
        }
        for good in ["off", "OFF", "on", "portable", "AVX2", "neon+dotprod"] {
            kernels(good).unwrap();
        }
        let told = kernels("bogus").unwrap_err().report().unwrap();
        assert!(
            told.contains("MLX_CPU_KERNELS") && told.contains("avx512"),
            "{told}"
        );
    }
}
