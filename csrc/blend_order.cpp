// Which dataset gives sample i of a blend; see blend_order.h.
//
// Built with -ffp-contract=off: a fused multiply-subtract would round differently from Megatron-LM.
#include "blend_order.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "vector_clones.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFew = 16;     // up to here a plain loop is fastest
constexpr int64_t kDirect = 128; // up to here comparing all is faster than keeping blocks
constexpr int64_t kStep = 16;    // members that are compared at once

#define MEGALITE_INLINE inline __attribute__((always_inline)) // into each clone of its caller

using Lead = BlendOrder::Lead;

inline double greater(double a, double b) { return a > b ? a : b; }
inline double lesser(double a, double b) { return a < b ? a : b; }

// Among members with these weights and counts; `size` is a multiple of kStep. Four parts are joined before the running maximum,
// each step of which waits for the one before.
MEGALITE_INLINE Lead largest_lag_inline(const double *weight, const double *given, const double *dataset, int64_t size,
                                        double progress) {
    const int64_t part = size / 4;
    const auto lag = [=](int64_t i) { return weight[i] * progress - given[i]; };
    double most = -kInfinity, first = kInfinity;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < part; ++i) {
        const double of_parts = greater(greater(lag(i), lag(i + part)), greater(lag(i + 2 * part), lag(i + 3 * part)));
        most = greater(of_parts, most);
    }
    const auto candidate = [=](int64_t i) { return dataset[i] + (lag(i) == most ? 0.0 : kInfinity); };
#pragma omp simd reduction(min : first)
    for (int64_t i = 0; i < part; ++i) {
        const double of_parts = lesser(lesser(candidate(i), candidate(i + part)), lesser(candidate(i + 2 * part), candidate(i + 3 * part)));
        first = lesser(of_parts, first);
    }
    return {most, first};
}

MEGALITE_VECTOR Lead largest_lag(const double *weight, const double *given, const double *dataset, int64_t size, double progress) {
    return largest_lag_inline(weight, given, dataset, size, progress);
}

struct BlockLead {
    Lead lead;
    double own;          // the leader's weight
    double above, below; // the largest lags among members with more weight than the leader, and with less
};

// Of one block; `member_of` and `weights` are those of all.
MEGALITE_VECTOR BlockLead lead_of_block(const double *weight, const double *given, const double *dataset,
                                        const int64_t *member_of, const double *weights, double progress) {
    const Lead lead = largest_lag_inline(weight, given, dataset, BlendOrder::kBlock, progress);
    if (lead.most == -kInfinity) return {lead, 0, -kInfinity, -kInfinity};
    const double own = weights[member_of[static_cast<int64_t>(lead.dataset)]];
    constexpr int64_t kHalf = BlendOrder::kBlock / 2;
    const auto lag = [=](int64_t i) { return weight[i] * progress - given[i]; };
    const auto heavier = [=](int64_t i) { return lag(i) - (weight[i] > own ? 0.0 : kInfinity); };
    const auto lighter = [=](int64_t i) { return lag(i) - (weight[i] < own ? 0.0 : kInfinity); };
    double above = -kInfinity, below = -kInfinity;
#pragma omp simd reduction(max : above, below)
    for (int64_t i = 0; i < kHalf; ++i) {
        above = greater(greater(heavier(i), heavier(i + kHalf)), above);
        below = greater(greater(lighter(i), lighter(i + kHalf)), below);
    }
    return {lead, own, above, below};
}

// Members that are never chosen, up to a multiple of `step`.
void fill_up(std::vector<double> &weight, std::vector<double> &given, std::vector<double> &dataset, int64_t step) {
    while (weight.size() % static_cast<size_t>(step) != 0) {
        weight.push_back(0.0);
        given.push_back(kInfinity);
        dataset.push_back(kInfinity);
    }
}

} // namespace

BlendOrder::BlendOrder(const double *weights, int64_t datasets)
    : counts_(static_cast<size_t>(datasets), 0), member_of_(static_cast<size_t>(datasets)) {
    const bool in_blocks = datasets > kDirect;
    std::vector<int64_t> order(static_cast<size_t>(datasets));
    std::iota(order.begin(), order.end(), 0);
    if (in_blocks) std::stable_sort(order.begin(), order.end(), [weights](int64_t a, int64_t b) { return weights[a] > weights[b]; });
    for (const int64_t dataset : order) {
        member_of_[static_cast<size_t>(dataset)] = static_cast<int64_t>(weight_.size());
        weight_.push_back(weights[dataset]);
        given_.push_back(0.0);
        dataset_.push_back(static_cast<double>(dataset));
    }
    if (datasets <= kFew) return;
    fill_up(weight_, given_, dataset_, in_blocks ? kBlock : kStep);
    if (!in_blocks) return;
    valid_until_.assign(weight_.size() / kBlock, 0);
    leader_weight_.assign(valid_until_.size(), 0.0);
    leader_given_.assign(valid_until_.size(), kInfinity);
    leader_dataset_.assign(valid_until_.size(), kInfinity);
    fill_up(leader_weight_, leader_given_, leader_dataset_, kStep);
}

int64_t BlendOrder::next() {
    const double progress = std::max(static_cast<double>(sample_), 1.0);
    const int64_t dataset = !valid_until_.empty()                        ? next_leader(progress)
                            : weight_.size() <= static_cast<size_t>(kFew) ? next_of_few(progress)
                                                                          : next_of_all(progress);
    const size_t member = static_cast<size_t>(member_of_[static_cast<size_t>(dataset)]);
    given_[member] = static_cast<double>(++counts_[static_cast<size_t>(dataset)]);
    ++sample_;
    return dataset;
}

int64_t BlendOrder::next_of_few(double progress) const {
    double most = -kInfinity;
    size_t chosen = 0;
    for (size_t i = 0; i < weight_.size(); ++i) {
        const double lag = weight_[i] * progress - given_[i];
        if (lag > most) {
            most = lag;
            chosen = i;
        }
    }
    return static_cast<int64_t>(chosen); // only blocks are reordered
}

int64_t BlendOrder::next_of_all(double progress) const {
    const int64_t size = static_cast<int64_t>(weight_.size());
    return static_cast<int64_t>(largest_lag(weight_.data(), given_.data(), dataset_.data(), size, progress).dataset);
}

int64_t BlendOrder::next_leader(double progress) {
    if (stale_ >= 0) {
        find_leader(static_cast<size_t>(stale_), progress);
        next_search_ = std::min(next_search_, valid_until_[static_cast<size_t>(stale_)]);
    }
    if (sample_ >= next_search_) {
        next_search_ = std::numeric_limits<int64_t>::max();
        for (size_t block = 0; block < valid_until_.size(); ++block) {
            if (sample_ >= valid_until_[block]) find_leader(block, progress);
            next_search_ = std::min(next_search_, valid_until_[block]);
        }
    }
    const double *weight = leader_weight_.data(), *given = leader_given_.data(), *dataset = leader_dataset_.data();
    const Lead lead = largest_lag(weight, given, dataset, static_cast<int64_t>(leader_weight_.size()), progress);
    const int64_t chosen = static_cast<int64_t>(lead.dataset);
    stale_ = member_of_[static_cast<size_t>(chosen)] / kBlock;
    return chosen;
}

Lead BlendOrder::find_leader(size_t block, double progress) {
    const double *weight = weight_.data() + block * kBlock, *given = given_.data() + block * kBlock;
    const double *dataset = dataset_.data() + block * kBlock;
    const auto [lead, own, above, below] = lead_of_block(weight, given, dataset, member_of_.data(), weight_.data(), progress);
    if (lead.most == -kInfinity) { // all retired
        leader_given_[block] = leader_dataset_[block] = kInfinity;
        valid_until_[block] = std::numeric_limits<int64_t>::max();
        return lead;
    }
    leader_weight_[block] = own;
    leader_given_[block] = static_cast<double>(counts_[static_cast<size_t>(lead.dataset)]);
    leader_dataset_[block] = lead.dataset;

    // Members with more weight than the leader may catch up, and the heaviest would do so first; those of equal weight keep
    // their distance exactly; those with less fall behind, but one within the rounding errors must be watched. The errors are
    // bounded for twice the present progress, so the promise is not made for longer than that.
    const double heaviest = weight[0];
    const double error = 16 * std::numeric_limits<double>::epsilon() * (heaviest * progress + 1);
    double steps = progress;
    if (above > -kInfinity) steps = std::min(steps, (lead.most - above - error) / (heaviest - own));
    if (lead.most - below <= error || !(steps > 1)) steps = 1;
    valid_until_[block] = sample_ + static_cast<int64_t>(steps);
    return lead;
}

void BlendOrder::retire(int64_t dataset) {
    const int64_t member = member_of_[static_cast<size_t>(dataset)];
    given_[static_cast<size_t>(member)] = kInfinity;
    if (!valid_until_.empty()) valid_until_[static_cast<size_t>(member / kBlock)] = next_search_ = 0;
}
