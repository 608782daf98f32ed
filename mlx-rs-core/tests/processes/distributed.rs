//! Tests groups of processes: a single process, and two processes in a ring on this machine. There
//! is only one test, because a process can join a group only once. The test starts itself again as
//! the two members.

use std::net::TcpListener;
use std::process::{Command, Stdio};

use mlx_rs_core::{Array, Dtype, ErrorKind, distributed};

const MEMBER: &str = "RUST_MLX_TEST_MEMBER";

#[test]
fn alone_and_in_a_ring() {
    if std::env::var_os(MEMBER).is_some() {
        return member();
    }
    alone();
    if !distributed::is_available() {
        return;
    }
    let ports = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let hosts: Vec<String> = ports
        .iter()
        .map(|p| format!("[\"{}\"]", p.local_addr().unwrap()))
        .collect();
    drop(ports);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hosts.json");
    std::fs::write(&file, format!("[{}]", hosts.join(","))).unwrap();
    let members: Vec<_> = ["0", "1"]
        .iter()
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "distributed::alone_and_in_a_ring", "--nocapture"])
                .env(MEMBER, "1")
                .env("MLX_RANK", rank)
                .env("MLX_HOSTFILE", &file)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for member in members {
        let out = member.wait_with_output().unwrap();
        assert!(
            out.status.success(),
            "{}\n{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }
}

fn alone() {
    let group = distributed::init(false).unwrap();
    assert_eq!((group.rank(), group.size()), (0, 1));
    let a = Array::vector(&[1.0f32, -2.0]).unwrap();
    for same in [
        group.all_sum(&a),
        group.all_max(&a),
        group.all_min(&a),
        group.all_gather(&a),
        group.sum_scatter(&a),
    ] {
        assert_eq!(same.unwrap().to_vec::<f32>().unwrap(), [1.0, -2.0]);
    }
    for rank in [0, 1, -1, i32::MAX] {
        assert_eq!(group.send(&a, rank).unwrap_err().kind(), ErrorKind::Index);
        assert_eq!(
            group.recv_like(&a, rank).unwrap_err().kind(),
            ErrorKind::Index
        );
        assert!(group.recv(&[1], Dtype::Float32, rank).is_err());
    }
    assert_eq!(
        group.split(0, 0).unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    assert!(group.sum_scatter(&Array::scalar(1.0f32).unwrap()).is_err());
    assert!(distributed::init(true).is_err(), "there is nobody else");
}

fn member() {
    let group = distributed::init(true).unwrap();
    assert_eq!(group.size(), 2);
    let rank = group.rank();
    let member_values = Array::vector(&[rank as f32, 10.0]).unwrap();
    let read = |a: mlx_rs_core::Result<Array>| a.unwrap().to_vec::<f32>().unwrap();
    assert_eq!(read(group.all_sum(&member_values)), [1.0, 20.0]);
    assert_eq!(read(group.all_max(&member_values)), [1.0, 10.0]);
    assert_eq!(read(group.all_min(&member_values)), [0.0, 10.0]);
    assert_eq!(
        read(group.all_gather(&member_values)),
        [0.0, 10.0, 1.0, 10.0]
    );
    let other = 1 - rank;
    if rank == 0 {
        assert_eq!(read(group.send(&member_values, other)), [0.0, 10.0]);
        assert_eq!(read(group.recv_like(&member_values, other)), [1.0, 10.0]);
    } else {
        assert_eq!(read(group.recv(&[2], Dtype::Float32, other)), [0.0, 10.0]);
        assert_eq!(read(group.send(&member_values, other)), [1.0, 10.0]);
    }
    for wrong in [rank, 2, -1] {
        assert!(group.send(&member_values, wrong).is_err());
    }
    assert!(group.recv(&[-1], Dtype::Float32, other).is_err());
    assert!(group.recv(&[i32::MAX; 4], Dtype::Float32, other).is_err());
    // A ring cannot be split, and the attempt must be an ordinary error.
    assert!(group.split(rank, 0).is_err());
}
