// Which dataset gives sample i of a blend: the one whose count lags most behind its weight, the lowest-numbered of equals.
//
// lag_d(i) = weight_d * max(i, 1) - count_d in double precision, as Megatron-LM computes it; its loop over all datasets costs
// O(datasets) a sample. Here datasets of similar weight stand in blocks. A block knows its leader and, from the lead
// over those with more weight and the differences of the weights, for how many steps nobody in it can catch up, rounding errors
// allowed for; until then only the leaders are compared. So a sample costs O(sqrt(datasets)), and the order is the same bit for
// bit. Few datasets are compared directly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

class BlendOrder {
  public:
    BlendOrder(const double *weights, int64_t datasets);

    int64_t next();                                                                        // the dataset of the next sample
    int64_t count(int64_t dataset) const { return counts_[static_cast<size_t>(dataset)]; } // how often it came
    void retire(int64_t dataset);                                                          // never choose it again

  private:
    static constexpr size_t kNone = ~size_t{0};

    int64_t next_of_few(double progress);
    template <int64_t kBlock> int64_t next_of_blocks(double progress);
    template <int64_t kBlock> double find_leader(size_t block, double progress); // returns its lag

    int64_t sample_ = 0;
    int64_t block_;                  // members of each block
    std::vector<int64_t> counts_;    // by dataset
    std::vector<int32_t> member_of_; // by dataset: its place among the members
    // By member, heaviest first, filled up to whole blocks. `given` is the count, or infinity when retired or no dataset.
    std::vector<double> weight_, given_, dataset_;
    // By block: its leader's values, and the sample from which on the leader must be sought again.
    std::vector<double> leader_weight_, leader_given_, leader_dataset_, leader_lag_;
    std::vector<int64_t> valid_until_;
    int64_t next_search_ = 0; // no valid_until_ is lower, but that of the stale block
    size_t stale_ = kNone;    // the block that gave the last sample
    double last_ = -1.0;      // the dataset that gave it
};
