//! The machines of a group with their addresses, from `--hosts` or from a file in the format of
//! `mlx.launch`.

use std::net::IpAddr;
use std::path::Path;

use serde::Deserialize;

use crate::cli::terminal::bounded;
use crate::cli::terminal::failure::Failure;
use inference_group::free_ports;

/// The default first port of `mlx.launch`.
pub const STARTING_PORT: u16 = 32323;

/// Maximum size of a hostfile in bytes, and maximum number of processes in it.
const MAX_FILE: u64 = 1 << 20;
const MAX_HOSTS: usize = 1 << 10;

/// One process to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The machine's name for ssh; `None` for this machine.
    pub ssh: Option<String>,
    /// The addresses at which other processes reach this one.
    pub ips: Vec<String>,
}

/// All processes, and the settings of the hostfile.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hosts {
    /// The hosts in the order of ranks.
    pub all: Vec<Host>,
    /// Environment variables for each process, as `NAME=VALUE`.
    pub envs: Vec<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    Full {
        #[serde(default)]
        backend: String,
        #[serde(default)]
        envs: Vec<String>,
        hosts: Vec<Entry>,
    },
    List(Vec<Entry>),
}

#[derive(Deserialize)]
struct Entry {
    ssh: String,
    #[serde(default)]
    ips: Vec<String>,
}

impl Hosts {
    /// Parses the text of a hostfile.
    ///
    /// # Errors
    /// If the text has another format, or requires a backend that this program cannot start.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let neither = || {
            String::from(
                "it is neither a list of {\"ssh\": NAME, \"ips\": [ADDRESS]} nor an object with \
                 such a list as \"hosts\"",
            )
        };
        let file: serde_json::Value = serde_json::from_str(text).map_err(|_| neither())?;
        // Checked by hand, because serde would also accept an array of a host's field values.
        let hosts = file.as_array().or_else(|| file["hosts"].as_array());
        if hosts.is_some_and(|hosts| !hosts.iter().all(serde_json::Value::is_object)) {
            return Err(neither());
        }
        let file: File = serde_json::from_value(file).map_err(|_| neither())?;
        let (backend, envs, entries) = match file {
            File::Full {
                backend,
                envs,
                hosts,
            } => (backend, envs, hosts),
            File::List(hosts) => (String::new(), Vec::new(), hosts),
        };
        match backend.as_str() {
            "" | "any" | "ring" => {}
            "mpi" => {
                return Err(String::from(
                    "its backend is mpi: start the program with `mpirun`, without `mlx launch`",
                ));
            }
            other => {
                return Err(format!(
                    "its backend is {other:?}; `mlx launch` starts rings, \"ring\""
                ));
            }
        }
        if entries.is_empty() || entries.len() > MAX_HOSTS {
            return Err(format!(
                "it has {} hosts; it must have 1 to {MAX_HOSTS}",
                entries.len()
            ));
        }
        let all = entries.into_iter().map(|entry| host(&entry.ssh, entry.ips));
        Ok(Self {
            all: all.collect::<Result<_, _>>()?,
            envs,
        })
    }

    /// Reads a hostfile.
    ///
    /// # Errors
    /// Those of [`Self::from_json`], with the name of the file.
    pub fn from_file(path: &Path) -> Result<Self, Failure> {
        let wrong = |message: String| Failure::usage(format!("{}: {message}", path.display()));
        let text = bounded::read_text(path, MAX_FILE).map_err(|e| wrong(e.to_string()))?;
        Self::from_json(&text).map_err(wrong)
    }

    /// Parses names or addresses separated by commas. Each is used `repeat` times.
    ///
    /// # Errors
    /// If a name is empty or starts with a dash, or if there are too many names.
    pub fn from_list(list: &str, repeat: usize) -> Result<Self, String> {
        let mut all = Vec::new();
        for name in list.split(',') {
            let one = host(name.trim(), Vec::new())?;
            all.extend(std::iter::repeat_n(one, repeat.min(MAX_HOSTS + 1)));
        }
        if all.len() > MAX_HOSTS {
            return Err(format!("there are more than {MAX_HOSTS} processes"));
        }
        Ok(Self {
            all,
            envs: Vec::new(),
        })
    }

    /// Whether all processes run on this machine.
    pub fn are_local(&self) -> bool {
        self.all.iter().all(|host| host.ssh.is_none())
    }

    /// The addresses of each process in the form of MLX's ring backend. Each address gets
    /// `connections` ports, from `first` on. Without `first`, local addresses get free ports.
    ///
    /// # Errors
    /// If there are not enough ports.
    pub fn ring(&self, first: Option<u16>, connections: usize) -> Result<Vec<Vec<String>>, String> {
        let wanted: usize = self.all.iter().map(|h| h.ips.len() * connections).sum();
        let ports = match first {
            None if self.are_local() => free_ports(wanted)?,
            first => {
                let first = first.unwrap_or(STARTING_PORT);
                (first..=u16::MAX).take(wanted).collect()
            }
        };
        if ports.len() < wanted {
            return Err(format!("{wanted} ports are needed, more than there are"));
        }
        let mut ports = ports.into_iter();
        let addresses = |host: &Host| {
            let each = host
                .ips
                .iter()
                .flat_map(|ip| std::iter::repeat_n(ip, connections));
            each.zip(ports.by_ref())
                .map(|(ip, port)| format!("{ip}:{port}"))
                .collect()
        };
        Ok(self.all.iter().map(addresses).collect())
    }
}

/// A host with this name for ssh.
fn host(name: &str, ips: Vec<String>) -> Result<Host, String> {
    // ssh would read a name that starts with a dash as an option.
    if name.is_empty() || name.starts_with('-') || name.contains(char::is_whitespace) {
        return Err(format!("{name:?} is no name of a host"));
    }
    let address = name.rsplit_once('@').map_or(name, |(_, host)| host);
    let ips = if ips.is_empty() {
        vec![address.to_owned()]
    } else {
        ips
    };
    if let Some(ip) = ips.iter().find(|ip| ip.contains(':') || ip.is_empty()) {
        return Err(format!(
            "{ip:?} is no address that MLX's rings can use: they speak IPv4"
        ));
    }
    Ok(Host {
        ssh: (!is_this_machine(name)).then(|| name.to_owned()),
        ips,
    })
}

fn is_this_machine(name: &str) -> bool {
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_mlx_launch_are_read() {
        let list = r#"[{"ssh": "one", "ips": ["10.0.0.1", "10.0.1.1"]}, {"ssh": "127.0.0.1"}]"#;
        let full = format!(
            r#"{{"backend": "ring", "envs": ["A=1"], "hosts": {}}}"#,
            list.replace("\"one\"", "\"one\", \"rdma\": [null, \"rdma_en2\"]")
        );
        let (list, full) = (
            Hosts::from_json(list).unwrap(),
            Hosts::from_json(&full).unwrap(),
        );
        assert_eq!(list.all, full.all);
        assert_eq!((list.envs.len(), full.envs), (0, vec!["A=1".to_owned()]));
        assert_eq!(list.all[0].ssh.as_deref(), Some("one"));
        assert_eq!(list.all[1].ssh, None);
        assert_eq!(
            list.ring(None, 2).unwrap(),
            [
                vec![
                    "10.0.0.1:32323",
                    "10.0.0.1:32324",
                    "10.0.1.1:32325",
                    "10.0.1.1:32326"
                ],
                vec!["127.0.0.1:32327", "127.0.0.1:32328"],
            ]
        );
    }

    #[test]
    fn files_of_other_kinds_are_refused() {
        for (text, told) in [
            ("[]", "1 to"),
            ("{}", "neither"),
            ("[[\"10.0.0.1:5000\"]]", "neither"),
            (r#"{"backend": "jaccl", "hosts": [{"ssh": "a"}]}"#, "jaccl"),
            (
                r#"{"backend": "mpi", "envs": [], "hosts": [{"ssh": "a"}]}"#,
                "mpirun",
            ),
            (r#"[{"ssh": "-oProxyCommand=x"}]"#, "no name"),
            (r#"[{"ssh": "a", "ips": ["fe80::1"]}]"#, "IPv4"),
        ] {
            let error = Hosts::from_json(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn lists_are_repeated() {
        let hosts = Hosts::from_list("127.0.0.1", 3).unwrap();
        assert!(hosts.are_local());
        let ring = hosts.ring(None, 1).unwrap();
        let distinct: std::collections::BTreeSet<_> = ring.concat().into_iter().collect();
        assert_eq!(distinct.len(), 3);
        let hosts = Hosts::from_list("me@10.0.0.1, two", 1).unwrap();
        assert_eq!(hosts.all[0].ips, ["10.0.0.1"]);
        assert_eq!(hosts.all[1].ssh.as_deref(), Some("two"));
        assert!(hosts.ring(Some(65535), 1).is_err());
        assert!(Hosts::from_list("a,,b", 1).is_err());
        assert!(Hosts::from_list("a", usize::MAX).is_err());
    }
}
