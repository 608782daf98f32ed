//! Runs tests in separate processes.

/// Runs a test in a separate process, because the test measures the whole process or changes its
/// settings. `test` is the test's full name, `module::function`.
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
