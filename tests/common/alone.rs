//! Runs tests in separate processes.

/// Runs a test in a separate process. `test` is the test's full name, `module::function`. There are
/// three reasons: the test measures the whole process, it changes the process's settings, or it
/// computes for seconds. Tests in one process wait for each other at MLX's lock, and two of them
/// take longer than one after the other.
pub fn alone(test: &str, body: impl FnOnce()) {
    const NAME: &str = "RUST_MLX_TEST_ALONE";
    if std::env::var(NAME).is_ok_and(|name| name == test) {
        return body();
    }
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(NAME, test)
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&run.stdout);
    let err = String::from_utf8_lossy(&run.stderr);
    assert!(
        run.status.success() && out.contains("1 passed"),
        "{test}: {}\n{out}{err}",
        run.status
    );
}
