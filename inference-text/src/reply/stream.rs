//! Streams a reply of any backend: from a conversation to events.

use std::fmt;

use inference::{
    ChatPrompt, Error, ErrorKind, GenerateOptions, Result, TextModel, Token, TokenStream,
};
use serde_json::Value;

use super::{Call, Event, Format, ParserOptions, Piece, Reply, ReplyParser, Tool, Tools, written};

/// Number of characters at the end of the prompt in which the start of reasoning is searched.
const TAIL: usize = 256;

/// Converts the tokens of one reply to events.
///
/// [`ReplyParser`] expects text. For a special token it needs the token's name, which the output
/// text does not contain.
pub struct TokenReader {
    parser: Box<dyn ReplyParser>,
}

impl TokenReader {
    /// A reader of replies in `format`.
    pub fn new(format: Format, options: ParserOptions) -> Self {
        Self {
            parser: format.parser(options),
        }
    }

    /// Reads one more token and returns its events.
    pub fn feed(&mut self, token: &Token) -> Vec<Event> {
        // A special token may also have text that was withheld before it. This text precedes the
        // token.
        let mut events = match token.text.as_str() {
            "" => Vec::new(),
            text => self.parser.feed(Piece::text(text)),
        };
        if token.special
            && let Some(name) = &token.bytes
        {
            let name = String::from_utf8_lossy(name);
            events.extend(self.parser.feed(Piece::special(token.id, &name)));
        }
        events
    }

    /// Ends the reply and returns the remaining events.
    pub fn finish(&mut self) -> Vec<Event> {
        self.parser.finish()
    }
}

impl fmt::Debug for TokenReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenReader").finish_non_exhaustive()
    }
}

/// A reply during its generation: an iterator of [`Event`]s. Dropping it cancels the request.
///
/// ```no_run
/// use inference::{ChatPrompt, GenerateOptions, Message, TextModel, Tool};
/// use inference_text::reply::{Event, ReplyStream};
///
/// # fn weather(model: &dyn TextModel) -> inference::Result<()> {
/// let prompt = ChatPrompt::new([Message::user("How warm is it in Paris?")])
///     .with_tools([Tool::new("temperature", None).with_description("In degrees of Celsius")]);
/// for event in ReplyStream::start(model, &prompt, &GenerateOptions::new())? {
///     match event? {
///         Event::Content(text) => print!("{text}"),
///         Event::CallStarted { name, .. } => println!("it calls {name}"),
///         _ => {}
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ReplyStream {
    tokens: TokenStream,
    /// `None` after the end of the stream.
    reader: Option<TokenReader>,
    ready: std::vec::IntoIter<Event>,
}

impl ReplyStream {
    /// Starts the reply to a conversation, in the format that the model's chat template shows. If
    /// the template shows no call format, the conversation describes the tools; see [`written`].
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a backend without access to tokens or to the template;
    /// otherwise as [`TextModel::generate`].
    pub fn start(
        model: &dyn TextModel,
        prompt: &ChatPrompt,
        options: &GenerateOptions,
    ) -> Result<Self> {
        let unsupported = |what: &str| Error::new(ErrorKind::Unsupported, what);
        let tokens = model
            .as_token_model()
            .ok_or_else(|| unsupported("this backend does not turn conversations into tokens"))?;
        let template = tokens
            .chat_template()
            .ok_or_else(|| unsupported("the model has no chat template that this backend shows"))?;
        let format = Format::detect(template, Some(model.model_type()));
        let prepared = written(format, prompt, |p| tokens.prepare_chat(p))?;
        let reader = reader(format, prompt, &prepared.text);
        Ok(Self::new(
            model.generate(&prepared.into(), options)?,
            reader,
        ))
    }

    /// Reads a stream that has already been started.
    pub fn new(tokens: TokenStream, reader: TokenReader) -> Self {
        Self {
            tokens,
            reader: Some(reader),
            ready: Vec::new().into_iter(),
        }
    }

    /// The underlying stream, with the metrics and the finish reason of the reply.
    pub fn tokens(&self) -> &TokenStream {
        &self.tokens
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The first error of the stream.
    pub fn collect_reply(self) -> Result<Reply> {
        let events = self.collect::<Result<Vec<_>>>()?;
        Ok(Reply::collect(events))
    }
}

/// Creates a reader of the reply to `prompt`. `rendered` is the prompt's text. Without tools, calls
/// are content. `prompt` must contain its tools, even if [`written`] described them in messages.
pub fn reader(format: Format, prompt: &ChatPrompt, rendered: &str) -> TokenReader {
    let format = match prompt.tools.is_empty() {
        true => format.without_calls(),
        false => format.with_calls(),
    };
    let start = rendered
        .char_indices()
        .rev()
        .nth(TAIL - 1)
        .map_or(0, |(at, _)| at);
    let options = ParserOptions::default()
        .with_tools(Tools::from(prompt.tools.as_slice()))
        .with_prompt_tail(&rendered[start..]);
    TokenReader::new(format, options)
}

impl Iterator for ReplyStream {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Result<Event>> {
        loop {
            if let Some(event) = self.ready.next() {
                return Some(Ok(event));
            }
            let reader = self.reader.as_mut()?;
            let events = match self.tokens.next() {
                Some(Ok(token)) => reader.feed(&token),
                Some(Err(error)) => {
                    self.reader = None;
                    return Some(Err(error));
                }
                None => {
                    let events = reader.finish();
                    self.reader = None;
                    events
                }
            };
            self.ready = events.into_iter();
        }
    }
}

impl std::iter::FusedIterator for ReplyStream {}

impl From<&[inference::Tool]> for Tools {
    fn from(tools: &[inference::Tool]) -> Self {
        let tool = |tool: &inference::Tool| Tool {
            name: tool.name.clone(),
            parameters: tool.parameters.clone().unwrap_or_default(),
        };
        Tools::new(tools.iter().map(tool).collect())
    }
}

impl From<Call> for inference::ToolCall {
    /// Converts the call to the form that messages contain. The arguments of a complete call are
    /// always a JSON object.
    fn from(call: Call) -> Self {
        let arguments = match serde_json::from_str(&call.arguments) {
            Ok(Value::Object(arguments)) => arguments,
            _ => serde_json::Map::new(),
        };
        Self::new(call.id, call.name, arguments)
    }
}
