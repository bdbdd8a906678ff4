"""The region: hugetlbfs files, one for each tenant, and the extents in them."""
