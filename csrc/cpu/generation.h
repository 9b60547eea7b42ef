// Sampling of all responses of a job on a CPU. Each prompt is computed once, or not at all if the
// decoder has kept it, and so is what samples of a prompt begin with alike; a finished response
// frees its slot for the next.
//
// In an episode, a sample that has ended a turn leaves its row and waits for `feed` with a cache
// that no other sample shares.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "decoder.h"

namespace maxrl::cpu {

class Generation {
 public:
  // The job's arrays and the decoder must outlive this object.
  Generation(Decoder& decoder, const GenerationJob& job);

  // Runs whole steps for about this long, or until a turn of an episode ends; returns whether all
  // responses are done.
  bool run(double seconds);

  // The samples whose turns have ended since the last call.
  std::vector<int64_t> take_turns() { return std::exchange(turns_, {}); }
  // Whether nothing can be computed before the next `feed`.
  bool all_wait() const;
  // Answers a sample that waits with tokens, which are read in place of sampling, or with none: its
  // episode ends. Throws std::invalid_argument if it does not wait, or has no room to sample more.
  void feed(int64_t sample, const std::vector<int64_t>& tokens);

  const GenerationStatistics& statistics() const { return statistics_; }

 private:
  struct Prompt : PromptState {
    int64_t unfinished;
  };
  // The samples order_[begin] to order_[end - 1] of a prompt, which have the same `length` tokens
  // so far: one forward pass is for all of them.
  struct Row {
    int64_t begin, end, length;
    KeyValueCache* cache;
  };

  struct Waiting {
    KeyValueCache* cache;  // null: the sample does not wait
    int64_t place;  // in order_
    int64_t num_turns;  // that have ended
  };
  // A row of which the tokens from number `length` on are to be read, except the last one.
  struct Fed {
    Row row;
    int64_t length;
  };

  void admit();
  void read();
  void prefill(int64_t begin, int64_t end);
  void decode();
  // Samples the next token of each of the row's samples.
  void append_tokens(Row& row, const float* logits, Workspace& workspace);
  // Splits rows whose samples drew different tokens, removes samples that are done and frees their
  // slots.
  void regroup();
  // `count` samples of a prompt are done.
  void finish(int64_t prompt, int64_t count);
  // The row of a forward pass that reads the last of its first `length` tokens.
  DecoderRow reading(const Row& row, int64_t length) const;
  int64_t prompt_of(const Row& row) const { return row.begin / job_.num_samples; }
  int64_t last_token(int64_t sample, int64_t length) const {
    return job_.responses[sample * job_.max_new_tokens + length - 1];
  }
  std::vector<int64_t> prompt_tokens(int64_t prompt) const {
    return {job_.tokens + job_.cu_seqlens[prompt], job_.tokens + job_.cu_seqlens[prompt + 1]};
  }
  int64_t prompt_length(int64_t prompt) const {
    return job_.cu_seqlens[prompt + 1] - job_.cu_seqlens[prompt];
  }

  Decoder& decoder_;
  const GenerationJob job_;
  std::vector<Prompt> prompts_;
  // A slot for each active sample, of which a row uses one: when it splits, others are free.
  std::vector<std::unique_ptr<KeyValueCache>> slots_;
  std::vector<KeyValueCache*> free_caches_;
  std::vector<int64_t> order_;  // [S], all samples; those of a prompt stay in its range
  std::vector<Row> rows_, rows_before_;  // rows of a prompt are adjacent
  std::vector<Workspace> workspaces_;
  int64_t next_sample_ = 0,
          next_prompt_ = 0;  // the first sample and the first prompt that are still waiting
  int64_t active_ = 0;  // samples in rows_, and those that wait
  std::vector<Waiting> waiting_;  // [S], or empty without environments
  std::vector<int64_t> turns_;  // samples whose turns have ended
  std::vector<Fed> fed_;
  int64_t cache_bytes_ = 0;
  GenerationStatistics statistics_{};
};

}  // namespace maxrl::cpu
