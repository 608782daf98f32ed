//! The end of this process, when another member or the launcher is lost.

use std::io::Write;

/// Waits until MLX is idle. The call takes the lock that all of MLX's work holds, even while that
/// work waits for other members.
pub(crate) fn wait_for_engine() {
    let _ = mlx_rs_core::distributed::is_available();
}

/// Ends this process immediately. Its main thread may wait inside MLX and cannot be interrupted,
/// and destructors would wait for threads that never end.
pub(crate) fn end(message: &str) -> ! {
    // The launcher that reads the message may have ended, and then `eprintln!` would panic.
    let _ = writeln!(std::io::stderr(), "error: {message}");
    signal_hook::low_level::exit(1)
}
