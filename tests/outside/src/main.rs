//! Lists the linked backends, then generates a reply with the backend that the command line names.

use inference::{GenerateOptions, LoadOptions, Prompt};
use metal_backend as _; // linked for its registrations

fn main() -> inference::Result<()> {
    let mut args = std::env::args().skip(1);
    let (name, path) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    for backend in inference::backends() {
        eprintln!("{} {} {}", backend.name(), backend.available(), backend.device());
    }
    let model = inference::load_model(path, &LoadOptions::new().with_backend(name))?;
    let options = GenerateOptions::new().with_max_tokens(8).with_ignore_eos(true);
    let output = model.generate(&Prompt::Tokens(vec![40, 41, 42]), &options)?.collect_output()?;
    println!("{:?}", output.tokens);
    Ok(())
}
