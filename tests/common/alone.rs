//! Runs tests in separate processes.

/// Runs a test in a separate process, because the test measures the whole process or changes its
/// settings. `test` is the test's full name, `module::function`.
#[allow(dead_code, reason = "each test binary uses a part")]
pub fn alone(test: &str, body: impl FnOnce()) {
    if !ran_elsewhere(test) {
        body();
    }
}

/// Runs the calling test in a separate process, and returns true: the test is done. In that process
/// it returns false, and the test goes on. Use it for tests that compute for seconds. In one
/// process, such tests would wait for each other at MLX's lock, and two concurrent tests would take
/// longer than two consecutive ones.
///
/// # Panics
/// If the test fails.
#[must_use]
pub fn ran_elsewhere(test: &str) -> bool {
    const NAME: &str = "RUST_MLX_TEST_ALONE";
    if std::env::var(NAME).is_ok_and(|name| name == test) {
        return false;
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
    true
}
