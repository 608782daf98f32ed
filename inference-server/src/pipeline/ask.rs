//! The steps from a validated request to its replies, for all APIs.

use std::time::Instant;

use inference::{ChatPrompt, GenerateOptions, Prompt};

use super::choice::ToolChoice;
use super::prepare::{self, Prepared};
use super::rounds::{self, Plan, Rounds};
use super::run::{self, Reply};
use crate::engine::Places;
use crate::error::ApiError;
use crate::models::Lease;
use crate::state::App;

/// The parameters of a request, without prompts.
pub(crate) struct Ask {
    /// The generation options. The token limit depends on the prompt, so it is set later.
    options: GenerateOptions,
    /// The name and value of the request's field for the maximum number of tokens.
    pub(crate) most: (&'static str, Option<usize>),
    /// The name and value of the request's field for the context size.
    pub(crate) context: (&'static str, Option<usize>),
    /// The maximum number of tokens of reasoning.
    pub(crate) reasoning: Option<usize>,
    /// The number of replies to each prompt.
    pub(crate) choices: usize,
    /// Whether replies are sent while they are generated.
    pub(crate) streamed: bool,
    arrived: Instant,
}

/// The started replies of a request.
pub(crate) struct Asked {
    /// The replies to the first prompt, then those to the second, and so on.
    pub(crate) replies: Vec<Reply>,
    pub(crate) prompts: Vec<Prepared>,
    /// The options of the replies, one entry per prompt.
    pub(crate) options: Vec<GenerateOptions>,
}

impl Ask {
    /// Parameters of one unstreamed reply, which may fill the context.
    ///
    /// # Errors
    /// If options contradict each other or are out of range.
    pub(crate) fn new(
        app: &App,
        options: GenerateOptions,
        arrived: Instant,
    ) -> Result<Self, ApiError> {
        let options = options.with_max_tokens(usize::MAX);
        Ok(Self {
            options: prepare::finish_options(app, options, arrived)?,
            most: ("max_tokens", None),
            context: ("context", None),
            reasoning: None,
            choices: 1,
            streamed: false,
            arrived,
        })
    }

    /// Starts replies to a conversation. `places` may have fewer places than the request needs.
    ///
    /// # Errors
    /// For a conversation, tools or a length that the server cannot serve, and if the queue is
    /// full.
    pub(crate) async fn chat(
        mut self,
        app: &App,
        model: &Lease,
        mut places: Places,
        mut prompt: ChatPrompt,
        choice: &ToolChoice,
    ) -> Result<Asked, ApiError> {
        // Checks without a prompt come first, before the request occupies more places.
        let grammar = self.options.constraints.grammar.as_ref();
        choice.check(app, model, &prompt, grammar)?;
        let own = prompt.tools.len();
        let plan = match &app.tools {
            Some(server) if rounds::offer(app, model, &mut prompt, choice, &self.options) => {
                Some(Plan {
                    app: app.clone(),
                    model: model.clone(),
                    server: server.clone(),
                    prompt: prompt.clone(),
                    own,
                    choice: choice.clone(),
                    options: self.options.clone(),
                    reasoning: self.reasoning,
                    arrived: self.arrived,
                })
            }
            _ => None,
        };
        prepare::grow(app, &mut places, self.choices)?;
        let (places, mut prepared) = prepare::chat(app, model, places, prompt).await?;
        choice.apply(app, model, &mut prepared, &mut self.options)?;
        prepare::bound_reasoning(model, &prepared, self.reasoning, &mut self.options)?;
        self.start(app, model, places, vec![prepared], plan).await
    }

    /// Starts replies that continue texts. `param` is the name of the request's field with the
    /// texts.
    ///
    /// # Errors
    /// For texts or a length that the server cannot serve, and if the queue is full.
    pub(crate) async fn texts(
        self,
        app: &App,
        model: &Lease,
        mut places: Places,
        param: &'static str,
        prompts: Vec<Prompt>,
    ) -> Result<Asked, ApiError> {
        prepare::grow(app, &mut places, prompts.len() * self.choices)?;
        let (places, prepared) = prepare::raw(app, model, places, param, prompts).await?;
        self.start(app, model, places, prepared, None).await
    }

    async fn start(
        self,
        app: &App,
        model: &Lease,
        mut places: Places,
        prompts: Vec<Prepared>,
        plan: Option<Plan>,
    ) -> Result<Asked, ApiError> {
        let mut replies = Vec::with_capacity(prompts.len() * self.choices);
        let mut all = Vec::with_capacity(prompts.len());
        for prompt in &prompts {
            let most = self.most_tokens(app, model, prompt.ids.len(), prompts.len())?;
            let options = self.options.clone().with_max_tokens(most);
            // Only the length remains to be checked. A full check would compile the grammar again.
            let least = options.stop.min_tokens;
            if least > most {
                let message =
                    format!("min_tokens is {least}; it must be at most max_tokens, {most}");
                return Err(ApiError::field("min_tokens", message));
            }
            for i in 0..self.choices {
                let place = places.one().ok_or_else(ApiError::internal)?;
                let options = of_choice(&options, i);
                let rounds = plan.clone().map(|mut plan| {
                    plan.options.sampling.seed = options.sampling.seed;
                    Rounds::new(plan, most)
                });
                let reply = Reply::start(app, model, place, prompt, options, self.arrived);
                replies.push(reply.with_rounds(rounds));
            }
            all.push(options);
        }
        if self.streamed {
            run::first_signs(&mut replies, app.limits.first_event).await?;
        }
        Ok(Asked {
            replies,
            prompts,
            options: all,
        })
    }

    /// Maximum number of tokens per reply. The request has `prompts` prompts, of which this one has
    /// `tokens` tokens.
    fn most_tokens(
        &self,
        app: &App,
        model: &Lease,
        tokens: usize,
        prompts: usize,
    ) -> Result<usize, ApiError> {
        let mut most = prepare::reply_tokens(app, model, tokens, self.most.1);
        if let (param, Some(context)) = self.context {
            if tokens >= context {
                return Err(ApiError::context(tokens, context).with_param(param));
            }
            most = most.min(context - tokens);
        }
        if self.streamed {
            return Ok(most);
        }
        let logprobs = self.options.output.logprobs;
        prepare::whole_tokens(app, self.most, prompts * self.choices, logprobs, most)
    }
}

impl Asked {
    /// The reply of a request with one prompt and one choice.
    ///
    /// # Errors
    /// [`ApiError::internal`] if no reply was started.
    pub(crate) fn one(mut self) -> Result<Reply, ApiError> {
        self.replies.pop().ok_or_else(ApiError::internal)
    }
}

/// The options of the `i`th reply to a prompt. Each reply has a different seed, so replies differ.
fn of_choice(options: &GenerateOptions, i: usize) -> GenerateOptions {
    let mut options = options.clone();
    options.sampling.seed = options
        .sampling
        .seed
        .map(|seed| seed.wrapping_add(i as u64));
    options
}
