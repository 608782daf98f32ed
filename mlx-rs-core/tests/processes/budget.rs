//! Sets a memory budget that is smaller than the existing arrays. The test runs in a separate
//! process, because the budget applies to the whole process.

use mlx_rs_core::{All, Dtype, ErrorKind, eval, idx, io, memory, ones, zeros};

#[test]
fn a_smaller_budget_refuses_results_but_not_what_exists() {
    crate::alone::alone(
        "budget::a_smaller_budget_refuses_results_but_not_what_exists",
        a_smaller_budget_refuses_results_but_not_what_exists_alone,
    );
}

fn a_smaller_budget_refuses_results_but_not_what_exists_alone() {
    let a = ones(&[64, 64], Dtype::Float32).unwrap();
    eval([&a]).unwrap();
    let before = memory::set_budget(2048);
    // Cloning, reading and results that fit the budget must still succeed.
    let b = a.clone();
    assert_eq!(b.data::<f32>().unwrap()[0], 1.0);
    assert_eq!(a.sum(All, false).unwrap().item::<f32>().unwrap(), 4096.0);
    assert_eq!(a.get(idx![..2, ..4]).unwrap().size(), 8);
    assert!(a.to_string().starts_with("array([[1, 1, 1, ..., 1, 1, 1],"));
    // Results that do not fit the budget must be errors.
    for e in [
        a.add(&b).unwrap_err(),
        a.get(idx![.., 1..]).unwrap_err(),
        b.at_idx(idx![0]).set(2.0).unwrap_err(),
    ] {
        assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{e}");
    }
    let mut file = Vec::new();
    io::write_npy(&mut file, &a).unwrap();
    let e = io::read_npy(&file[..]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{e}");
    assert_eq!(memory::set_budget(before), 2048);

    // The budget is never larger than the machine's memory. Beyond it, MLX would crash.
    memory::set_budget(u64::MAX);
    assert!(memory::budget() <= memory::physical_memory().unwrap_or(64 << 30));
    let e = zeros(&[1 << 20, 1 << 22], Dtype::Uint8).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OutOfMemory);
    memory::set_budget(before);
    assert_eq!(io::read_npy(&file[..]).unwrap().shape(), [64, 64]);
}
