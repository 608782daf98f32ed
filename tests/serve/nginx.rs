//! The example for nginx in docs/serve.md, with TLS, in front of two servers. It runs where nginx
//! and openssl are installed, such as by Debian's packages `nginx-light` and `openssl`. The
//! certificate is made for the test.

use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::served::{Served, agent};
use crate::{long_copy, serve_args};

/// A running nginx. Dropping it ends the process.
struct Nginx {
    child: Child,
    url: String,
    /// A client that trusts only the test's authority.
    client: ureq::Agent,
    _dir: tempfile::TempDir,
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The path of nginx; `None` if it is not installed.
fn installed() -> Option<&'static str> {
    ["/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/bin/nginx"]
        .into_iter()
        .find(|path| Path::new(path).exists())
}

/// Runs openssl in a directory. Returns whether it is installed.
fn openssl(dir: &Path, args: &str) -> bool {
    let run = Command::new("openssl")
        .args(args.split(' '))
        .current_dir(dir)
        .output();
    let Ok(run) = run else {
        return false;
    };
    let log = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "openssl {args}: {log}");
    true
}

/// Makes an authority `ca.pem`, and its certificate `mlx.pem` for this machine. Returns whether
/// openssl is installed.
fn certify(dir: &Path) -> bool {
    let new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2";
    let authority = "-subj /CN=authority -keyout ca.key -out ca.pem";
    let server = "-subj /CN=127.0.0.1 -keyout mlx.key -out mlx.pem -CA ca.pem -CAkey ca.key \
                  -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE";
    openssl(dir, &format!("{new} {authority}")) && openssl(dir, &format!("{new} {server}"))
}

/// A client that trusts an authority.
fn client_of(authority: &Path) -> ureq::Agent {
    let pem = std::fs::read(authority).unwrap();
    let roots = [Certificate::from_pem(&pem).unwrap()];
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&roots))
        .build();
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .proxy(None)
        .timeout_global(Some(Duration::from_secs(600)))
        .tls_config(tls)
        .build()
        .into()
}

/// The documented example. Only addresses and paths differ.
fn configuration(servers: [&Served; 2], port: u16, dir: &Path) -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/serve.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let (_, rest) = docs.split_once("```nginx\n").unwrap();
    let (example, _) = rest.split_once("```").unwrap();
    let mut example = example.to_owned();
    let mut replace = |from: &str, to: &str| {
        assert!(example.contains(from), "{from} is not in the example");
        example = example.replace(from, to);
    };
    for (documented, server) in ["10.0.0.1:8080", "10.0.0.2:8080"].into_iter().zip(servers) {
        replace(documented, server.url.strip_prefix("http://").unwrap());
    }
    let dir = dir.display();
    replace("listen 443 ssl", &format!("listen 127.0.0.1:{port} ssl"));
    replace("/etc/ssl/mlx.pem", &format!("{dir}/mlx.pem"));
    replace("/etc/ssl/mlx.key", &format!("{dir}/mlx.key"));
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|what| format!("{what}_temp_path {dir}/{what};\n"))
        .collect();
    format!(
        "daemon off;\nmaster_process off;\npid {dir}/pid;\nerror_log {dir}/error.log;\nevents {{}}\n\
         http {{\naccess_log off;\n{paths}{example}}}\n"
    )
}

/// Starts nginx in `dir`, which has its certificate.
fn start(program: &str, servers: [&Served; 2], dir: tempfile::TempDir) -> Nginx {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let file = dir.path().join("nginx.conf");
    std::fs::write(&file, configuration(servers, port, dir.path())).unwrap();
    let child = Command::new(program)
        .arg("-p")
        .arg(dir.path())
        .arg("-c")
        .arg(&file)
        .arg("-e")
        .arg(dir.path().join("error.log"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let url = format!("https://127.0.0.1:{port}");
    let until = Instant::now() + Duration::from_secs(60);
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        let log = std::fs::read_to_string(dir.path().join("error.log"));
        assert!(Instant::now() < until, "nginx does not start: {log:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Nginx {
        child,
        url,
        client: client_of(&dir.path().join("ca.pem")),
        _dir: dir,
    }
}

fn long((agent, url): (&ureq::Agent, &str), key: &str, n: usize) -> ureq::Body {
    let body = json!({"prompt": "x", "max_tokens": n, "temperature": 0, "ignore_eos": true,
        "stream": true});
    let answer = agent
        .post(format!("{url}/v1/completions"))
        .header("Authorization", format!("Bearer {key}"))
        .send(body.to_string())
        .unwrap_or_else(|e| panic!("{url}: {e}"));
    assert_eq!(answer.status(), 200, "{url}");
    answer.into_body()
}

#[test]
fn the_documented_proxy_streams_and_survives_a_server() {
    let Some(program) = installed() else {
        println!("ignored: nginx is not installed");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    if !certify(dir.path()) {
        println!("ignored: openssl is not installed");
        return;
    }
    let model = long_copy("llama");
    let model = model.path().to_str().unwrap();
    let args = ["--parallel", "1", model];
    let mut servers = [serve_args(&args), serve_args(&args)];
    let nginx = start(program, [&servers[0], &servers[1]], dir);
    let proxy = (&nginx.client, nginx.url.as_str());
    // Without the authority, the certificate is refused.
    let untrusted = agent().get(format!("{}/health", nginx.url)).call();
    assert!(untrusted.is_err());

    // All requests of a key go to one server, and the whole reply arrives.
    let mut text = String::new();
    let mut body = long(proxy, "key", 20);
    body.as_reader().read_to_string(&mut text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let status = (nginx.client.get(format!("{}/metrics", nginx.url))).call();
    assert_eq!(status.unwrap().status(), 403);

    // Both servers are busy, so this request waits. A buffering proxy would hold back the few bytes
    // of the comment that tells its client that the stream is alive.
    let busy: Vec<_> = servers
        .iter()
        .flat_map(|server| (0..2).map(|_| long((&agent(), &server.url), "key", 8000)))
        .collect();
    let mut waiting = long(proxy, "key", 20);
    let mut comment = [0; 6];
    waiting.as_reader().read_exact(&mut comment).unwrap();
    assert_eq!(&comment, b": ping");
    drop((waiting, busy));

    // One server ends; requests of all keys go to the other one.
    servers[0].child.kill().unwrap();
    servers[0].child.wait().unwrap();
    for i in 0..8 {
        let mut text = String::new();
        let mut body = long(proxy, &format!("key{i}"), 5);
        body.as_reader().read_to_string(&mut text).unwrap();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
}
