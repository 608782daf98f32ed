//! Tests of the chat page at `/`: which clients receive it, and that it loads nothing from other
//! servers.

use crate::common::{config, serve};

#[test]
fn a_browser_gets_the_page_and_its_files() {
    let server = serve(&config().with_api_key(String::from("secret")));
    let browser = server.client().with("Accept", "text/html,*/*;q=0.8");
    let page = browser.get("/");
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    let mut files = Vec::new();
    for part in page.text().split(['"', '\'']) {
        if part.starts_with('/') {
            files.push(part.to_owned());
        }
        // The page must not load from other servers, and must not contain inline code.
        assert!(!part.starts_with("http"), "{part}");
    }
    assert!(!page.text().contains("<script>"));
    let handler = |word: &str| word.starts_with("on") && word.contains('=');
    assert!(!page.text().split_whitespace().any(handler));
    assert_eq!(files, ["/ui/style.css", "/ui/app.js"]);
    files.push(String::from("/ui/markdown.js"));
    for file in files {
        let answer = browser.get(&file);
        assert_eq!(answer.status, 200, "{file}");
        assert_eq!(answer.header("content-security-policy"), Some(policy));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        let text = answer.text();
        for bad in ["innerHTML", "eval(", "document.write"] {
            assert!(!text.contains(bad), "{file} has {bad}");
        }
    }
}

#[test]
fn others_get_a_sign_of_life() {
    let server = serve(&config());
    assert_eq!(server.client().get("/").text(), "Ollama is running");
    let server = serve(&config().with_ui(false));
    let browser = server.client().with("Accept", "text/html");
    assert_eq!(browser.get("/").text(), "Ollama is running");
    assert_eq!(browser.get("/ui/app.js").status, 404);
}
