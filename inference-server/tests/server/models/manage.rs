//! Tests of `/api/tags` and `/api/show` for models that are not loaded, of several names for the
//! same files, and of `/api/delete`.

use super::*;

#[test]
fn what_files_say_is_told_of_models_that_are_not_loaded() {
    let server = serve(&config(), Shelf::new(&["one"]), Vec::new());
    let tags = server.client.get("/api/tags").expect(200);
    let details = &tags["models"][0]["details"];
    assert_eq!(
        (
            &details["format"],
            &details["quantization_level"],
            &details["parameter_size"]
        ),
        (&json!("gguf"), &json!("Q4_K_M"), &json!(""))
    );
    let show = server.client.post("/api/show", &json!({"model": "one"}));
    let show = show.expect(200);
    assert_eq!(show["license"], "apache-2.0");
    assert_eq!(show["template"], "{{ messages }}");
    assert_eq!(show["details"]["parameter_size"], "134.5M");
    assert_eq!(show["details"]["family"], "tiny");
    let parameters: Vec<&str> = show["parameters"]
        .as_str()
        .unwrap()
        .split_whitespace()
        .collect();
    assert_eq!(parameters, ["temperature", "0.6"]);
    assert!(server.shelf.loads().is_empty(), "looking loads nothing");
}

#[test]
fn files_with_two_names_are_listed_and_loaded_once() {
    let mut shelf = Shelf::new(&["one"]);
    shelf.alias = Some(("own/one", "one"));
    let server = serve(&config(), shelf, Vec::new());
    for (path, list) in [("/api/tags", "models"), ("/v1/models", "data")] {
        let all = server.client.get(path).expect(200);
        assert_eq!(all[list].as_array().unwrap().len(), 1, "{path}");
    }
    server
        .client
        .post("/api/show", &json!({"model": "own/one"}))
        .expect(200);
    assert_eq!(server.says("own/one")["model"], "one");
    server.says("one");
    assert_eq!(server.shelf.loads(), ["one"]);
}

#[test]
fn models_are_deleted_where_the_owner_lets_clients_do_it() {
    let delete = |server: &Running, name: &str| {
        let body = json!({"model": name}).to_string();
        server.client.ask("DELETE", "/api/delete", body.as_bytes())
    };
    let server = serve(&config(), Shelf::new(&["one"]), Vec::new());
    let error = delete(&server, "one").expect(403);
    assert!(error["error"].as_str().unwrap().contains("--allow-delete"));
    assert!(server.shelf.deleted.lock().unwrap().is_empty());

    let mut shelf = Shelf::new(&["one", "own/two"]);
    shelf.deletes = true;
    let server = serve(&config(), shelf, Vec::new());
    server.says("one");
    assert_eq!(delete(&server, "one").status, 200);
    assert!(server.shelf.closed("one"), "it is unloaded before");
    assert_eq!(*server.shelf.deleted.lock().unwrap(), ["one"]);
    delete(&server, "one").expect(404);
    let error = delete(&server, "own/two").expect(400);
    assert!(
        error["error"]
            .as_str()
            .unwrap()
            .contains("not in the caches")
    );
    delete(&server, "").expect(400);
}

#[test]
fn what_cannot_be_made_here_is_an_error_that_says_what_can() {
    let server = serve(&config(), Shelf::new(&["one"]), Vec::new());
    let post = |path: &str, body: Value, status: u16| {
        let error = server.client.post(path, &body).expect(status);
        error["error"].as_str().unwrap().to_owned()
    };
    let copy = json!({"source": "one", "destination": "two"});
    assert!(post("/api/copy", copy, 400).contains("not copied"));
    let copy = json!({"source": "absent", "destination": "two"});
    assert!(post("/api/copy", copy, 404).contains("not served"));
    assert!(post("/api/copy", json!({"source": "one"}), 400).contains("destination"));
    let create = json!({"model": "two", "from": "one", "quantize": "q4_K_M"});
    let said = post("/api/create", create, 400);
    assert!(
        said.contains("mlx convert") && said.contains("mlx create"),
        "{said}"
    );
    assert!(post("/api/create", json!({}), 400).contains("model is missing"));
}
